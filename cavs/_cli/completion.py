"""Scripts that complete commands and options in a shell. They are made from the parser, so they know every option."""

import argparse

from cavs._cli.parser import Parser

_BASH = """_cavs() {{
  local words file=""
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands} --help --version" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands} --help --version"; file=""; fi
  local current="${{COMP_WORDS[COMP_CWORD]}}"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ -n "$file" ] && [ "${{current#-}}" = "$current" ]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _cavs cavs
"""
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


def script(parser: Parser, shell: str) -> str:
    """The script for `bash`, `zsh` or `fish`."""
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    cases = []
    for name, command in commands.items():
        words = " ".join(option for action in command._actions for option in action.option_strings)
        shells = " bash zsh fish" if name == "completion" else ""
        cases.append(f'    {name}) words="{words}{shells}"; file=yes ;;')
    return (_ZSH if shell == "zsh" else "") + _BASH.format(cases="\n".join(cases), commands=" ".join(commands))


def _fish(commands: dict[str, Parser]) -> list[str]:
    lines = [f"complete -c cavs -n __fish_use_subcommand -f -a {name}" for name in commands]
    for name, command in commands.items():
        for action in command._actions:
            for option in action.option_strings:
                kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                told = (action.help or "").replace("\\", "").replace("'", "")
                lines.append(f"complete -c cavs -n '__fish_seen_subcommand_from {name}' {kind} -d '{told}'")
    return lines
