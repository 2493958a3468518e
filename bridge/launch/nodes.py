"""What a cluster has, from what `sinfo` prints, and what of a profile it cannot serve. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bridge.config.profile import Allocation, Profile, allocation
from bridge.config.stages import STAGE_KINDS, Resources
from bridge.config.words import nearest
from bridge.launch.script import GPU_OPTION, minutes
from bridge.progress import duration

SINFO = "%P|%a|%l|%L|%T|%G|%f"
DEAD = ("down", "drain", "fail", "maint", "inval", "unknown", "future", "error")
SUFFIXES = "~#!%$@^-+"  # powered off, powering up, reserved …: such nodes can still be given to a job


@dataclass(frozen=True)
class Nodes:
    """The nodes of one partition that are alike."""

    partition: str
    default: bool
    """Jobs that name no partition go here."""
    state: str
    """Of the partition: `up`, or why it starts no jobs."""
    limit: float
    """Seconds that a job may take at most; infinite where there is no limit."""
    usual: float
    """Seconds that a job gets which names no time."""
    alive: bool
    gres: Mapping[tuple[str, str], int]
    """(name, type) → number on each node, such as ("gpu", "a100") → 8; the type may be empty."""
    features: frozenset[str]


class Wish(NamedTuple):
    """What the launcher asks for, for some kinds of stages."""

    kinds: tuple[str, ...]
    need: Allocation
    own: frozenset[str]
    """The settings that the profile makes for the first kind alone."""

    @property
    def who(self) -> str:
        return ", ".join(self.kinds)

    def at(self, setting: str) -> str:
        """Where the profile makes a setting, or would."""
        return f"`{f'stages.{self.kinds[0]}' if setting in self.own else 'defaults'}.{setting}`"


class Problem(NamedTuple):
    found: str
    remedy: str


def read_nodes(text: str) -> list[Nodes]:
    """What `sinfo -h -a -e -o SINFO` printed."""
    found = []
    for line in text.splitlines():
        partition, state, limit, usual, nodes, gres, features = line.split("|", 6)
        longest = clock(limit)
        found.append(
            Nodes(
                partition=partition.removesuffix("*"),
                default=partition.endswith("*"),
                state=state,
                limit=longest,
                usual=min(clock(usual), longest),
                alive=not nodes.startswith(DEAD) and not nodes.rstrip(SUFFIXES).endswith("*"),
                gres=read_gres(gres),
                features=frozenset(features.split(",")) - {"(null)", ""},
            )
        )
    return found


def clock(text: str) -> float:
    """Slurm's `7-00:00:00`, `4:00:00` or `2:00` in seconds; `infinite` and `n/a` are infinite."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return math.inf
    total = 0
    for part in parts:
        total = 60 * total + int(part)
    return total + 86400 * int(days or 0)


def read_gres(text: str) -> dict[tuple[str, str], int]:
    """`gpu:a100:8(S:0-1),shard:4` → {("gpu", "a100"): 8, ("shard", ""): 4}."""
    found: dict[tuple[str, str], int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = item.split(":")
        number = rest.pop() if rest and rest[-1].isdigit() else "1"
        if name:
            key = (name, rest[0] if rest else "")
            found[key] = found.get(key, 0) + int(number)
    return found


def wishes(profile: Profile) -> list[Wish]:
    """What each kind of stage gets where the experiment names no resources; kinds that get the same are together."""
    found: list[Wish] = []
    for kind in STAGE_KINDS:
        need = allocation(profile, kind, Resources())
        same = next((i for i, wish in enumerate(found) if wish.need == need), None)
        if same is None:
            own = profile.stages[kind].model_fields_set if kind in profile.stages else ()
            found.append(Wish((kind,), need, frozenset(own)))
        else:
            found[same] = found[same]._replace(kinds=(*found[same].kinds, kind))
    return found


def chosen(need: Allocation, nodes: Sequence[Nodes]) -> list[Nodes]:
    """The nodes that an allocation can get."""
    names = need.partition.split(",") if need.partition else [n.partition for n in nodes if n.default]
    return [n for n in nodes if n.partition in names]


def partition_problems(wish: Wish, nodes: Sequence[Nodes]) -> Iterator[Problem]:
    """A partition that does not exist, starts no jobs, or has no working node."""
    known, mine, setting = {n.partition for n in nodes}, chosen(wish.need, nodes), wish.at("partition")
    for name in wish.need.partition.split(",") if wish.need.partition else []:
        if name not in known:
            yield Problem(f"{wish.who}: there is no partition {name!r}{nearest(name, known)}", f"change {setting}")
    if not mine and not wish.need.partition:
        said = f"{wish.who}: no partition is named, and the cluster has no default"
        yield Problem(said, f"write {setting}: one of {', '.join(sorted(known))}")
    for name, state in dict.fromkeys((n.partition, n.state) for n in mine if n.state != "up"):
        yield Problem(f"{wish.who}: the partition {name} is {state}", f"wait, or change {setting}")
    if mine and not any(n.alive for n in mine):
        names = ", ".join(dict.fromkeys(n.partition for n in mine))
        yield Problem(f"{wish.who}: no node of {names} can run jobs now", f"see `sinfo -R`; wait, or change {setting}")


def time_problems(wish: Wish, nodes: Sequence[Nodes], warn: int) -> Iterator[Problem]:
    """A time that no partition allows, or that is over before the stage has begun."""
    mine = chosen(wish.need, nodes)
    if not mine:
        return
    limit = max(n.limit for n in mine)
    time = 60 * minutes(wish.need.time) if wish.need.time else max(n.usual for n in mine)
    if time > limit:
        said = f"{wish.who}: {wish.need.time} is longer than {duration(limit)}, the limit of the partition"
        yield Problem(said, f"lower {wish.at('time')}: a stage that needs longer saves, is requeued and goes on")
    elif time <= warn:
        said = f"{wish.who}: the limit is {duration(time)}, and a stage is told to stop {warn} s before it"
        yield Problem(said, f"raise {wish.at('time')}, or lower `warn`")


def gpus(nodes: Sequence[Nodes]) -> str:
    """The GPUs of the cluster, for people."""
    kinds = sorted({_gres(name, model, n) for node in nodes for (name, model), n in node.gres.items()})
    return f"on the nodes: {', '.join(kinds) or 'none'}"


def _gres(name: str, model: str, number: int) -> str:
    return ":".join(word for word in (name, model, str(number)) if word)


def gpu_problems(wish: Wish, nodes: Sequence[Nodes]) -> Iterator[Problem]:
    """GPUs that no node of the partition has, or not so many."""
    mine = chosen(wish.need, nodes)
    if not wish.need.gpus or not mine:
        return
    name, model = wanted_gres(wish.need.gpu_option or GPU_OPTION)
    there: dict[str, int] = {}
    for node in mine:
        for (its_name, its_model), count in node.gres.items():
            if its_name == name:
                there[its_model] = max(there.get(its_model, 0), count)
    most = there.get(model, 0) if model else max(there.values(), default=0)
    if wish.need.gpus > most:
        shown = ", ".join(_gres(name, m, n) for m, n in there.items()) or f"no {name} at all"
        said = f"{wish.who}: no node of its partition has {_gres(name, model, wish.need.gpus)}; there is {shown}"
        yield Problem(said, f"change {wish.at('gpus')}, {wish.at('gpu_option')} or {wish.at('partition')}")


def wanted_gres(option: str) -> tuple[str, str]:
    """Name and type in `--gres=gpu:a100:{gpus}` or `--gpus-per-node=a100:{gpus}`; the type may be empty."""
    flag, _, value = option.partition("=")
    words = next(item for item in value.split(",") if "{gpus}" in item).split(":")[:-1]
    if flag != "--gres":
        words = ["gpu", *words]
    return (words[0] if words else "gpu"), (words[1] if len(words) > 1 else "")


def feature_problems(wish: Wish, nodes: Sequence[Nodes]) -> Iterator[Problem]:
    """Features of `constraint` that no node of the partition has."""
    mine = chosen(wish.need, nodes)
    if not wish.need.constraint or not mine:
        return
    there = frozenset().union(*(n.features for n in mine))
    for name in re.findall(r"[^][(){}&|,*!\s]+", re.sub(r"\*\d+", "", wish.need.constraint)):
        if name not in there:
            said = f"{wish.who}: no node of its partition has the feature {name!r}{nearest(name, there)}"
            yield Problem(said, f"change {wish.at('constraint')}")
