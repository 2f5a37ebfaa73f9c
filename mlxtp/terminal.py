"""How a command that cannot go on says so: a red line for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from .errors import Code, MlxtpError

VARIABLE = "_MLXTP_COMPLETE"


class Commands(TyperGroup):
    """The `mlxtp` command, whose errors go to stderr in words.

    With --json they go to stdout, where the answer would stand: {"error": {"code", "message"}}, and nothing
    else. The exit status (`Exit`) is the same.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run what `args` say and end the process."""
        given = sys.argv[1:] if args is None else list(args)
        if VARIABLE in os.environ:  # a shell asks how a word goes on
            completion_init()
        as_json = "--json" in given
        try:
            status = super().main(
                given,
                prog_name,
                complete_var,
                standalone_mode=standalone_mode and not as_json,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except MlxtpError as error:
            if as_json:
                _print_json(error.code, error.detail)
            else:
                _print_red(error.detail)
            sys.exit(error.exit_status)
        except typer.TyperException as mistyped:
            _print_json(Code.CONFIG, mistyped.format_message())
            sys.exit(mistyped.exit_code)
        sys.exit(status)


def _print_json(code: Code, message: str) -> None:
    typer.echo(json.dumps({"error": {"code": code, "message": message}}, ensure_ascii=False))


def _print_red(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]mlxtp:[/] {escape(message)}")
