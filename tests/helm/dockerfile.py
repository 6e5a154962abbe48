"""The Dockerfiles as their tests need them: what an image sets, starts, and is made by."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.chart import ROOT

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """One stage, with the arguments and variables that its last line sees.

    Attributes:
        base: an image, or the name of a stage before.
        variables: those of ENV, the base's too, which its processes have.
        arguments: those of ARG, which only its RUN steps see.
        steps: (instruction, the rest of its line) in order, without the base's.
    """

    base: str
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The rest of the last line with this instruction.

        Raises:  IndexError: if there is none.
        """
        return [rest for word, rest in self.steps if word == instruction][-1]


@dataclass(frozen=True)
class Image:
    """What `docker build` would make of a Dockerfile.

    Attributes:
        variables: of every process in it.
        entrypoint: the command of a container that names none.
        workdir: where it starts.
        installs: the RUN steps of the stage "build", whose result is copied.
        install_variables: what these see.
    """

    variables: dict[str, str]
    entrypoint: list[str]
    workdir: str
    installs: list[str]
    install_variables: dict[str, str]


def read_image(service: str, **arguments: str) -> Image:
    """Read docker/SERVICE.Dockerfile, with these --build-arg."""
    text = (ROOT / "docker" / f"{service}.Dockerfile").read_text(encoding="utf-8")
    stages = read_stages(text, arguments)
    last, build = list(stages.values())[-1], stages["build"]
    return Image(
        variables=last.variables,
        entrypoint=json.loads(last.last("ENTRYPOINT")),
        workdir=last.last("WORKDIR"),
        installs=[rest for word, rest in build.steps if word == "RUN"],
        install_variables={**build.arguments, **build.variables},
    )


def read_stages(text: str, given: Mapping[str, str]) -> dict[str, Stage]:
    """Every stage by its name, in order; one without a name has its number."""
    stages: dict[str, Stage] = {}
    outside: dict[str, str] = {}  # ARGs before the first FROM, for the FROM lines alone
    stage: Stage | None = None
    for word, rest in _instructions(text):
        if word == "FROM":
            base, _, name = _expand(rest, outside).partition(" AS ")
            below = stages.get(base)
            stage = Stage(base, {**below.variables} if below else {"PATH": _PATH})
            stages[name or str(len(stages))] = stage
        elif word == "ARG":
            name, _, default = rest.partition("=")
            seen = outside if stage is None else {**stage.arguments, **stage.variables}
            value = given.get(name, _expand(default, seen))
            (outside if stage is None else stage.arguments)[name] = value
        else:
            assert stage is not None, f"{word} stands before the first FROM"
            stage.steps.append((word, rest))
            if word == "ENV":
                # All variables of one ENV see those before it, not one another.
                seen = {**stage.arguments, **stage.variables}
                pairs = (pair.partition("=") for pair in shlex.split(rest))
                stage.variables |= {name: _expand(value, seen) for name, _, value in pairs}
    return stages


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.strip().partition(" ") for line in whole.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in pairs]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Fill in ${NAME}; one that is not known is empty, as in a build."""
    return re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], ""), text)
