"""R³ in the RL stage: prompts that end inside a demonstration, and which of them a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.config.stages import Starts
from bridge.tasks.starts import answer_begins, stage_of, token_starts
from bridge.train.batches import stream
from bridge.train.chat import Chat
from bridge.train.dataset import Dataset


@dataclass(frozen=True)
class Start:
    """What sampling begins from: a question and the first tokens of its worked solution."""

    row: int
    """The row of the dataset."""
    state: int
    """Which of the row's start states; 0 is the one with the fewest tokens given."""
    prompt: list[int]
    """Token ids up to where sampling starts, with those that are given."""
    given: list[int]
    """The tokens of the response that are given: neither sampled nor learnt from."""


def start_states(chat: Chat, data: Dataset, starts: Starts | None) -> list[list[Start]]:
    """For each row its start states, the same number for every row.

    Without `starts` it is one: the bare question, or what a file in R³'s mixed form gives. With it, the demonstrations
    of the dataset are cut.

    Raises UserError where a row has no demonstration to cut, or is cut already.
    """
    conversations = [example.prompt for example in data.examples]
    if starts is None:
        given = chat.ids([example.start for example in data.examples])
        prompts = chat.prompts(conversations)
        return [
            [Start(row, 0, [*prompt, *ids], ids)] for row, (prompt, ids) in enumerate(zip(prompts, given, strict=True))
        ]
    found: list[list[Start]] = []
    for row, whole in enumerate(chat.demonstrations(conversations, data.responses())):
        cuts = token_starts(whole.ids, whole.ends, whole.text, answer_begins(whole.text), starts)
        found.append(
            [Start(row, state, [*whole.prompt, *whole.ids[:cut]], whole.ids[:cut]) for state, cut in enumerate(cuts)]
        )
    return found


def chosen(
    states: Sequence[Sequence[Start]], starts: Starts | None, step: int, steps: int, count: int, seed: int
) -> list[Start]:
    """The start states of a rollout batch: `count` of all of them in a random order that repeats when all were used,
    or, in a staged curriculum, of those whose turn it is."""
    if starts is not None and starts.mode == "staged":
        state = stage_of(step, steps, len(states[0]))
        pool = [row[state] for row in states]
    else:
        pool = [start for row in states for start in row]
    return [pool[place] for place in stream(len(pool), step * count, count, seed)]


def by_state(found: Sequence[Start], correct: Sequence[float]) -> dict[str, float]:
    """Share of right answers for each start state of a batch, for the metrics; empty where there is one state only."""
    states = sorted({start.state for start in found})
    if states == [0]:
        return {}
    shares = {}
    for state in states:
        own = [value for start, value in zip(found, correct, strict=True) if start.state == state]
        shares[f"correct_start_{state}"] = sum(own) / len(own)
    return shares
