"""The devices of this machine."""
