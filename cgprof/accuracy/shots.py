"""Solved examples that stand before a worded problem, so that a model sees the form of answers."""

from __future__ import annotations

EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "A ferry carries 14 cars on each crossing and makes 6 crossings a day. "
        "How many cars does it carry in a day?",
        "It makes 6 crossings with 14 cars each, so it carries 6 * 14 = 84 cars.\n#### 84",
    ),
    (
        "Nadia has 50 euros. She buys three notebooks at 4 euros each and a lamp for 21 euros. "
        "How many euros are left?",
        "The notebooks cost 3 * 4 = 12 euros.\nTogether with the lamp that is 12 + 21 = 33 euros."
        "\nShe has 50 - 33 = 17 euros left.\n#### 17",
    ),
    (
        "A tank holds 240 litres and is three quarters full. A pump takes out 15 litres a minute. "
        "After how many minutes is it empty?",
        "It holds 240 * 3 / 4 = 180 litres at first.\nThe pump needs 180 / 15 = 12 minutes."
        "\n#### 12",
    ),
    (
        "In a school of 360 pupils, 40 % take the bus and half of the others walk. "
        "How many pupils walk?",
        "360 * 40 / 100 = 144 pupils take the bus.\nThe others are 360 - 144 = 216 pupils."
        "\nHalf of them, 216 / 2 = 108, walk.\n#### 108",
    ),
)
