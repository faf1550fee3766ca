"""The whole tree of commands: each explains itself, and scripts can rely on each.

Nothing is listed here by hand: a new command is found by walking, and has to keep the same rules.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from loraplex_platform.cli import errors
from loraplex_platform.cli.errors import CommandGroup

from tests.support.command_tree import COMMANDS, TREE, groups, invoke, options_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "loraplex_platform.cli"]
# Their flags, and so their help, are those of the modules that they become.
PASSED_ON = {("engine",), ("bench", "run"), ("bench", "profile")}
# What a name says that it prints: something for programs to read.
SHOWS = re.compile(
    r"^(list|show|compare|preview|quote|effective|explain|deliveries|imports|status|history|series|events"
    r"|invitations|uploads|usage|requests|overview|fleet|drift|recipient"
    r"|outbox|retention|reconcile|doctor|plan)$"
)


def run(*arguments: str) -> tuple[int, str, str]:
    names = [name for name in os.environ if name.startswith("LORAPLEX_")]
    result = invoke(arguments, {**dict.fromkeys(names), "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_tree_is_walked() -> None:
    assert len(COMMANDS) > 80
    assert {("up",), ("doctor",), ("plan",), ("eval", "schedule", "create")} <= COMMANDS.keys()


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: tuple[str, ...]) -> None:
    text = COMMANDS[words].help or ""

    assert "Example" in text
    # As it is typed: the example is of this command, and not of another one.
    shown = [line.strip() for line in text.splitlines() if "loraplex " in line]
    assert any(f"loraplex {' '.join(words)}" in line for line in shown), text
    if words not in PASSED_ON:
        code, output, _ = run(*words, "--help")
        assert code == 0
        assert "Example" in output


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - PASSED_ON), ids=" ".join)
def test_every_example_can_be_typed(words: tuple[str, ...]) -> None:
    text = (COMMANDS[words].help or "").replace("\\\n", " ")
    typed = [
        # What follows in a pipe, a list or a substitution is another command.
        re.split(r""" && | > | \| |\)(?="|$)""", line.partition("loraplex ")[2])[0]
        for line in text.splitlines()
        if re.match(r"""\s*((export|echo) "?)?(\w+=\S+ |\w+=\$\()*loraplex """, line)
    ]

    assert typed
    wrong = []
    for line in typed:
        given = shlex.split(line)
        assert tuple(given[: len(words)]) == words, line
        try:
            COMMANDS[words].make_context(words[-1], given[len(words) :])
        except Exception as error:  # noqa: BLE001 - whatever the command line finds wrong with it
            wrong.append(f"{line}: {error}")
    # The files of an example need not be here.
    assert [line for line in wrong if "does not exist" not in line] == []


@pytest.mark.parametrize("words", sorted(PASSED_ON), ids=" ".join)
def test_the_help_of_a_command_that_becomes_another_is_that_ones(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*PROGRAM, *words, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert "--" in done.stdout


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=" ".join)
def test_every_argument_and_option_is_explained(words: tuple[str, ...]) -> None:
    unexplained = [
        parameter.name
        for parameter in COMMANDS[words].params
        if not getattr(parameter, "help", None) and parameter.name != "help"
    ]

    assert unexplained == []


@pytest.mark.parametrize(
    "words", sorted(words for words in COMMANDS if SHOWS.match(words[-1])), ids=" ".join
)
def test_what_lists_or_shows_has_json(words: tuple[str, ...]) -> None:
    assert "--json" in options_of(COMMANDS[words])


def test_no_secret_is_a_flag() -> None:
    secret = re.compile(r"password|secret|pepper|api-key|admin-key|(?<!max-)token$")
    flags = {
        f"{' '.join(words)} {flag}"
        for words, command in COMMANDS.items()
        for parameter in command.params
        for flag in getattr(parameter, "opts", ())
        # A switch holds none.
        if secret.search(flag) and flag.startswith("--") and not parameter.is_flag
    }

    # Command lines are everybody's to read.
    assert flags == set()


@pytest.mark.parametrize("words", sorted(dict(groups(TREE))), ids=lambda w: " ".join(w) or "root")
def test_every_group_turns_errors_into_sentences_and_explains_itself(
    words: tuple[str, ...],
) -> None:
    group = dict(groups(TREE))[words]

    assert isinstance(group, CommandGroup)
    assert group.help


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - PASSED_ON), ids=" ".join)
def test_a_flag_that_there_is_not_is_wrong_usage(words: tuple[str, ...]) -> None:
    code, out, err = run(*words, "--no-such-flag")

    assert code == errors.EXIT_USAGE == 2
    assert out == ""
    assert "--no-such-flag" in err or "Missing" in err


@pytest.mark.parametrize(
    "words",
    sorted(w for w, c in COMMANDS.items() if "--control-url" in options_of(c)),
    ids=" ".join,
)
def test_a_control_api_that_is_away_is_a_failure_in_one_sentence(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    given = []
    for parameter in COMMANDS[words].params:
        if parameter.required:
            flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
            given += [*flag, *_value_of(parameter, tmp_path)]
    if "--yes" in options_of(COMMANDS[words]):
        given.append("--yes")
    env = {"LORAPLEX_ADMIN_KEY": "lpx_ak_x", "LORAPLEX_CONTROL_URL": "http://127.0.0.1:1"}

    result = invoke([*words, *given], env)

    # Some read a file or ask a question first; none shows a traceback or pretends that it worked.
    assert result.exit_code in (errors.EXIT_FAILED, errors.EXIT_USAGE), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output


def _value_of(parameter: Any, folder: Path) -> list[str]:
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return [str(get_args(kind)[0])]
    if kind is Path:
        file = folder / "input"
        file.write_text("{}")
        return [str(file)]
    return ["1"]


# ------------------------------------------------------------------------------------ completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ad", {"adapters"}),
        ("doc", {"doctor"}),
        ("keys r", {"revoke", "rotate"}),
        ("eval schedule cr", {"create"}),
        ("doctor --str", {"--strict"}),
    ],
)
def test_bash_completes_commands_and_flags(typed: str, offered: set[str], tmp_path: Path) -> None:
    # A real bash, with the script that `loraplex --install-completion` installs.
    program = tmp_path / "loraplex"
    program.write_text(f"#!{sys.executable}\nfrom loraplex_platform.cli import app\n\napp()\n")
    program.chmod(0o755)
    # Typer's own switch: else it would ask which shell has started these tests, and there may be none.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    env = os.environ | named | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = typed.split()
    bash = shutil.which("bash")
    assert bash is not None
    script = subprocess.run(
        [str(program), "--show-completion", "bash"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    function = re.search(r"^(_\w+)\(\)", script, re.MULTILINE)
    assert function is not None, script

    ask = (
        f"{script}\nCOMP_WORDS=(loraplex {' '.join(words)}); COMP_CWORD={len(words)}\n"
        f"{function[1]} loraplex; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run([bash, "-c", ask], env=env, capture_output=True, text=True, check=True)

    assert offered == set(done.stdout.split()), done.stderr
