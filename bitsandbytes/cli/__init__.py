"""Commands: `python -m bitsandbytes` (what runs here, and does it work) and `python -m bitsandbytes demo`.

A command's module is imported only when it runs, so `--help` stays fast.
"""

import argparse
from collections.abc import Sequence
import sys
from typing import NoReturn

DEMO_KINDS = ("float", "nf4", "nf4-dq", "fp4", "int8")
DEMO_DTYPES = ("float32", "bfloat16", "float16")


class CommandError(Exception):
    """The user asked for something that cannot be done; the message is one line and says what would work."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def _at_least(minimum: int, text: str) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got '{text}'")
    return int(text)


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in DEMO_KINDS:
            raise argparse.ArgumentTypeError(f"unknown kind '{kind}', valid are {', '.join(DEMO_KINDS)}")
    return list(dict.fromkeys(kinds))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m bitsandbytes", description="4-bit and 8-bit quantisation for PyTorch.")
    commands = parser.add_subparsers(dest="command", metavar="{info,demo}", required=True)

    info = commands.add_parser(
        "info",
        help="versions, devices, backends and a self-test (the default)",
        description="Print versions, devices, backends and the implementation of each operator, then quantise and "
        "compare on every device. Exit status 0: all is well; 1: the last line says what is not.",
    )
    info.add_argument("--json", action="store_true", help="print one JSON object on standard output")

    demo = commands.add_parser(
        "demo",
        help="a chat model in float, 4 and 8 bits: memory, speed, quality",
        description="Load a causal language model through transformers in each kind of weights, and print memory, "
        "speed, token NLL and a greedy answer of each. Writes demo.json and demo.png.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--device", default="cpu", help="where to run: cpu, npu:0, cuda:0, ...")
    demo.add_argument(
        "--model", metavar="DIR", help="a local Hugging Face model directory; None is SmolLM2-135M-Instruct"
    )
    demo.add_argument("--kinds", type=_kinds, default=",".join(DEMO_KINDS), help="comma-separated kinds of weights")
    demo.add_argument("--tokens", type=lambda t: _at_least(2, t), default=40, help="new tokens of the answer")
    demo.add_argument("--prompt", default="What is the capital of France?", help="what to ask the model")
    demo.add_argument("--text", metavar="FILE", help="UTF-8 text for the NLL; None is the text of this package")
    demo.add_argument("--dtype", choices=DEMO_DTYPES, default="float32", help="dtype of computation")
    demo.add_argument("--output-dir", metavar="DIR", default="demo-results", help="where demo.json and demo.png go")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for options that cannot be served."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        args.insert(0, "info")
    try:
        options = _parser().parse_args(args)
        if options.command == "demo":
            from bitsandbytes.cli import demo

            return demo.run(options)
        from bitsandbytes.cli import info

        return info.run(options)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
