"""The help of the examples: descriptions as they are written, and the defaults of arguments that have one."""

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """For `argparse.ArgumentParser(formatter_class=...)`."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)
