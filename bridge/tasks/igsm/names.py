"""The names of things. The last word of an item is its category, so the text alone says what belongs to what."""

from __future__ import annotations

from functools import cache

from bridge.config.tasks import Ecosystem, IgsmSettings

# Family → categories from the outermost to the innermost; every name reads "each X's Y" without ambiguity.
ECOSYSTEMS: dict[Ecosystem, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "harbor": (
        ("Harbor", ("Amber", "Coral", "Misty", "Pebble", "Silver", "Sunken")),
        ("Ship", ("Cargo", "Rescue", "Swift", "Tall", "Trader", "Survey")),
        ("Cabin", ("Bright", "Corner", "Guest", "Lower", "Quiet", "Upper")),
        ("Chest", ("Brass", "Cedar", "Iron", "Leather", "Oak", "Painted")),
    ),
    "museum": (
        ("Museum", ("Castle", "Folk", "Glass", "Garden", "Railway", "River")),
        ("Hall", ("East", "Echo", "Marble", "Mirror", "Round", "West")),
        ("Cabinet", ("Carved", "Narrow", "Pine", "Plain", "Sealed", "Walnut")),
        ("Coin", ("Bronze", "Gold", "Rare", "Roman", "Square", "Worn")),
    ),
    "farm": (
        ("Farm", ("Brook", "Hill", "Meadow", "Sunrise", "Valley", "Windmill")),
        ("Orchard", ("Fenced", "New", "Old", "Shady", "Sloping", "Walled")),
        ("Tree", ("Apple", "Cherry", "Fig", "Pear", "Plum", "Quince")),
        ("Nest", ("Finch", "Magpie", "Robin", "Swallow", "Thrush", "Wren")),
    ),
    "station": (
        ("Station", ("Dawn", "Frontier", "Lunar", "Orbit", "Polar", "Relay")),
        ("Module", ("Crew", "Docking", "Engine", "Lab", "Medical", "Storage")),
        ("Locker", ("Blue", "Green", "Orange", "Purple", "White", "Yellow")),
        ("Sensor", ("Gas", "Heat", "Light", "Motion", "Sound", "Tilt")),
    ),
}


Family = list[tuple[str, list[str]]]
"""Categories from the outermost inwards, each with its item names."""


def families(settings: IgsmSettings) -> list[Family]:
    """The families of names in use."""
    return _families(tuple(settings.ecosystems or ECOSYSTEMS), settings.names)


@cache
def _families(ecosystems: tuple[Ecosystem, ...], names: int) -> list[Family]:
    return [
        [(category, [f"{word} {category}" for word in words[:names]]) for category, words in ECOSYSTEMS[ecosystem]]
        for ecosystem in ecosystems
    ]


def quantity(container: str, thing: str) -> str:
    """How a quantity is called in every sentence: `thing` is an item or, for a total, a category."""
    return f"each {container}'s {thing}"
