"""Run `keras-dp`, or `python -m keras_dp`, with a package for each of its commands.

`keras-dp` itself does not import TensorFlow, because that takes seconds. Work that needs TensorFlow runs in other processes.
"""

import argparse
import io
import os
import platform
import shlex
import sys
from collections.abc import Sequence

from keras_dp import installation
from keras_dp.cli.bench import command as bench_command
from keras_dp.cli.check import command as check_command
from keras_dp.cli.launch import command as launch_command
from keras_dp.cli.plan import command as plan_command
from keras_dp.version import __version__

COMMANDS = {"bench": bench_command, "check": check_command, "launch": launch_command, "plan": plan_command}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands.

    Args:
        arguments: the command line without the program's name; None for this process's command line.

    Returns:
        The exit code: 0 if the command has succeeded, another number otherwise.

    Raises:
        SystemExit: with code 2, if the arguments are wrong; the message is on stderr.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # An argument that is not of the terminal's encoding is printed as it was given.
        sys.stdout.reconfigure(errors="surrogateescape")
    parser = argparse.ArgumentParser(prog="keras-dp", description="Tools for data-parallel training with Keras.")
    parser.add_argument("--version", action="version", version=versions(), help="print the versions and exit")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, command in COMMANDS.items():
        description = command.__doc__ or name
        command_parser = commands.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    options.command = shlex.join(["keras-dp", *arguments])
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # Whoever reads the output, such as `head`, has read enough. Python would fail once more to write the rest as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def versions() -> str:
    """Returns the versions of keras_dp, Keras, TensorFlow and Python in one line."""
    beside = f"Keras {installation.version('keras')}, TensorFlow {installation.version('tensorflow')}"
    return f"keras_dp {__version__} with {beside}, Python {platform.python_version()}"
