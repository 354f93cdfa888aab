"""Format the help of the examples: keep descriptions as they are written, and show defaults where there are any."""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formats help in `argparse.ArgumentParser(formatter_class=...)`."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)
