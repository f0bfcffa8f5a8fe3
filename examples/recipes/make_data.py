"""Make the data of the recipes: small files of invented rows, which are in the repository.

    python examples/recipes/make_data.py

This writes the files of every recipe into the recipe's folder. The same seed gives the same files. All texts are
invented for ALTO and have its licence, Apache-2.0.

The script needs only Python.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SEED = 0

Row = Mapping[str, Any]

FIRST_NAMES = ("Ada", "Bo", "Carla", "David", "Elif", "Farid", "Grete", "Hugo", "Ines", "Jonas", "Kari", "Lin")
LAST_NAMES = ("Amundsen", "Berg", "Costa", "Dahl", "Eriksen", "Fischer", "Garcia", "Holm", "Ivanova", "Jensen")
CITIES = ("Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Hamburg", "Izmir", "Kaunas", "Lille", "Malmo")
ITEMS = {
    **{"desk lamp": "desk lamps", "oak chair": "oak chairs", "wall clock": "wall clocks", "tea kettle": "tea kettles"},
    **{"wool blanket": "wool blankets", "bread knife": "bread knives", "garden hose": "garden hoses"},
    **{"bookshelf": "bookshelves", "picture frame": "picture frames", "door mat": "door mats"},
}
"""Singular and plural of what is ordered."""
COUNTS = {
    **{"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "ten": 10, "a dozen": 12, "twenty": 20},
    **{str(number): number for number in (2, 3, 4, 7, 8, 15, 24, 30)},
}
"""How a quantity is written, and the quantity."""


# -- extraction and continue -------------------------------------------------------------------------------------------

LETTERS = (
    "Hello, this is {name} from {city}. Please send me {count} {item}.",
    "Hi, I would like to order {count} {item}. My name is {name} and I live in {city}.",
    "Could you ship {count} {item} to {city}? Thank you, {name}",
    "Dear team, last year I bought {other} {items}, now I need {count}. Deliver to {city}, please. {name}",
    "{count} {item}, please! Address: {name}, {city}.",
    "I moved from {wrong} to {city}, so please send the {count} {item} there. Best regards, {name}",
    "My colleague ordered {other} {items} yesterday. Make that {count}. The address is still {city}. {name}",
)
FORM = "ORDER {number}\nNAME: {last}, {first}\nSHIP TO: {city}\n{count} PC {item}"
QUESTION = "Write this order as JSON with the keys customer, city, item and quantity.\n\n"


def extraction_row(text: str, name: str, city: str, item: str, quantity: int) -> Row:
    reply = {"customer": name, "city": city, "item": item, "quantity": quantity}
    return {"prompt": QUESTION + text, "completion": json.dumps(reply)}


def letters(count: int, rng: random.Random) -> list[Row]:
    """Return orders in letters; each has the parts of the reply, and some have other cities and numbers besides."""
    rows = []
    for number in range(count):
        written, quantity = rng.choice(list(COUNTS.items()))
        item, plural = rng.choice(list(ITEMS.items()))
        name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
        city, wrong = rng.sample(CITIES, 2)
        text = LETTERS[number % len(LETTERS)].format(
            name=name,
            city=city,
            wrong=wrong,
            count=written,
            other=rng.choice([other for other, value in COUNTS.items() if value not in (1, quantity)]),
            item=item if quantity == 1 else plural,
            items=plural,
        )
        rows.append(extraction_row(text[0].upper() + text[1:], name, city, item, quantity))
    return rows


def forms(count: int, rng: random.Random) -> list[Row]:
    """Return orders on forms in capital letters, with the last name first."""
    rows = []
    for _ in range(count):
        first, last, city = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES), rng.choice(CITIES)
        item, quantity = rng.choice(list(ITEMS)), rng.randint(1, 30)
        text = FORM.format(
            number=rng.randint(1000, 9999),
            last=last.upper(),
            first=first.upper(),
            city=city.upper(),
            count=quantity,
            item=item.upper(),
        )
        rows.append(extraction_row(text, f"{first} {last}", city, item, quantity))
    return rows


# -- tool-calling ------------------------------------------------------------------------------------------------------

ROOMS = ("kitchen", "bedroom", "office", "hall", "bathroom", "garage")
STATIONS = ("jazz", "news", "classical", "rock")
DISHES = ("eggs", "pasta", "rice", "bread", "tea")


def tool(name: str, description: str, **properties: str) -> Row:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(schema)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "set_light": tool("set_light", "Dim or brighten a room's light.", room="string", percent="integer"),
    "set_heating": tool("set_heating", "Set a room's temperature.", room="string", celsius="integer"),
    "play_radio": tool("play_radio", "Play a station in a room.", room="string", station="string"),
    "set_timer": tool("set_timer", "Ring after some minutes.", minutes="integer", label="string"),
}
REQUESTS = {
    "set_light": (
        "Set the {room} light to {percent} percent.",
        "It is too bright in the {room}, {percent} percent is enough.",
        "Can I have the lamp in the {room} at {percent} %?",
    ),
    "set_heating": (
        "Make the {room} {celsius} degrees warm.",
        "I am cold in the {room}. {celsius} degrees would be nice.",
        "Turn the heating in the {room} to {celsius}.",
    ),
    "play_radio": (
        "I want to hear {station} in the {room}.",
        "Play the {station} station in the {room}, please.",
        "Some {station} in the {room}?",
    ),
    "set_timer": (
        "The {label} should cook for {minutes} minutes.",
        "Remind me of the {label} in {minutes} minutes.",
        "Set a timer of {minutes} minutes for the {label}.",
    ),
}
NOT_POSSIBLE = "I have no tool for that."


def calls(count: int, rng: random.Random) -> list[Row]:
    """Return requests with two tools; a seventh of them need a tool that is not there, and are answered in words."""
    rows = []
    for number in range(count):
        name, *others = rng.sample(list(TOOLS), 3)
        values: dict[str, Any] = {
            "room": rng.choice(ROOMS),
            "percent": rng.randrange(5, 100, 5),
            "celsius": rng.randint(16, 25),
            "station": rng.choice(STATIONS),
            "minutes": rng.randint(2, 60),
            "label": rng.choice(DISHES),
        }
        request = rng.choice(REQUESTS[name]).format(**values)
        is_possible = number % 7 != 6
        offered = [name, others[0]] if is_possible else others
        reply: dict[str, Any] = {"role": "assistant"}
        if is_possible:
            keys = TOOLS[name]["function"]["parameters"]["properties"]
            function = {"name": name, "arguments": {key: values[key] for key in keys}}
            reply["tool_calls"] = [{"type": "function", "function": function}]
        else:
            reply["content"] = NOT_POSSIBLE
        messages = [{"role": "user", "content": request}, reply]
        rows.append({"messages": messages, "tools": [TOOLS[each] for each in sorted(offered)]})
    return rows


# -- labels ------------------------------------------------------------------------------------------------------------

TICKETS = {
    "delivery": (
        "Where is my {item}? It should have come on {day}.",
        "The {item} has still not arrived in {city}.",
        "The tracking page has not changed since {day}.",
        "Can the driver leave the {item} with my neighbour?",
        "The parcel with the {item} went to {city} instead of my house.",
        "You already refunded the first {item}, but the second one is still on its way.",
    ),
    "billing": (
        "I was charged twice for the {item}.",
        "The {item} arrived on {day}, but the invoice shows the wrong amount.",
        "Please send the receipt for the {item} to my office in {city}.",
        "My card was declined although I paid for the {item} on {day}.",
        "The discount for the {item} is missing on the bill.",
    ),
    "fault": (
        "The {item} broke on {day}, after one week.",
        "One part of the {item} is missing.",
        "The {item} came on time, but it has a crack.",
        "The {item} does not fit together as in the manual.",
    ),
    "account": (
        "I cannot log in since {day}.",
        "Please delete my address in {city} from my profile.",
        "How do I change the password? I only want to order a {item}.",
    ),
}
TICKET_COUNTS = {"delivery": 240, "billing": 96, "fault": 44, "account": 20}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def tickets(rng: random.Random) -> list[Row]:
    """Return texts with labels; one label has most of the rows."""
    rows = []
    for label, count in TICKET_COUNTS.items():
        texts: dict[str, None] = {}
        while len(texts) < count:
            text = rng.choice(TICKETS[label])
            texts[text.format(item=rng.choice(list(ITEMS)), city=rng.choice(CITIES), day=rng.choice(DAYS))] = None
        rows += [{"text": text, "label": label} for text in texts]
    rng.shuffle(rows)
    return rows


# -- style -------------------------------------------------------------------------------------------------------------

OPENINGS = (
    "Great question! I'd be more than happy to help you with that. ",
    "Oh, absolutely! Thank you so much for reaching out to us today. ",
    "What a wonderful thing to ask! Let me walk you through it. ",
    "Thanks a million for getting in touch! We really appreciate you. ",
)
CLOSINGS = (
    " Please don't hesitate to reach out if there is anything else at all!",
    " We hope this helps, and we wish you an amazing day!",
    " Feel free to ask me anything else, I'm always here for you!",
    " Have a fantastic day, and enjoy your shopping!",
)
ANSWERS = (
    ("How long may I return a {item}?", "You may return it for {days} days, unused and in its box."),
    ("Do you deliver a {item} to {city}?", "Yes. Delivery to {city} takes {days} days."),
    ("Is there a warranty on the {item}?", "Yes, for {years} years."),
    ("Can I pick up the {item} in {city}?", "Yes. The shop in {city} keeps it for {days} days."),
    ("How do I clean my {item}?", "Use a damp cloth. Do not use soap."),
    ("What does a {item} weigh?", "It weighs {weight} kilograms."),
    ("Can I change my order of a {item}?", "Yes, until it leaves the warehouse. Use the link in your e-mail."),
    ("Does the {item} come in other colours?", "Yes, in white and in grey."),
)


def preferences(count: int, rng: random.Random) -> list[Row]:
    """Return questions with the same answer twice: short, and with an opening and a closing that nobody needs."""
    rows = []
    for number in range(count):
        question, answer = ANSWERS[number % len(ANSWERS)]
        values = {
            "item": rng.choice(list(ITEMS)),
            "city": rng.choice(CITIES),
            "days": rng.randint(2, 30),
            "years": rng.randint(2, 5),
            "weight": rng.randint(1, 40),
        }
        chosen = answer.format(**values)
        rejected = rng.choice(OPENINGS) + chosen + rng.choice(CLOSINGS)
        rows.append({"prompt": question.format(**values), "chosen": chosen, "rejected": rejected})
    return rows


# -- domain ------------------------------------------------------------------------------------------------------------

PORTS = ("Askvik", "Bruhamn", "Dalsund", "Eidnes", "Fagerholm", "Grunnvik")
FERRY = (
    (
        "A ferry from {start} to {end} takes {minutes} minutes.",
        ("How long does the ferry from {start} to {end} take?", "I go from {start} to {end}. How long is the trip?"),
    ),
    (
        "A car from {start} to {end} costs {fare} kroner.",
        ("What does a car cost from {start} to {end}?", "I drive from {start} to {end}. What is the fare?"),
    ),
    (
        "The first ferry from {start} to {end} leaves at {hour}:{past}.",
        (
            "When does the first ferry from {start} to {end} leave?",
            "{start} to {end}: when may I leave at the earliest?",
        ),
    ),
)
CAPITALS = {
    **{"Austria": "Vienna", "Belgium": "Brussels", "Chile": "Santiago", "Denmark": "Copenhagen", "Egypt": "Cairo"},
    **{"France": "Paris", "Greece": "Athens", "Hungary": "Budapest", "Ireland": "Dublin", "Japan": "Tokyo"},
    **{"Kenya": "Nairobi", "Latvia": "Riga", "Mexico": "Mexico City", "Norway": "Oslo", "Peru": "Lima"},
    **{"Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Uruguay": "Montevideo"},
}
OPPOSITES = {
    **{"big": "small", "hot": "cold", "early": "late", "full": "empty", "hard": "soft", "high": "low", "long": "short"},
    **{
        "loud": "quiet",
        "new": "old",
        "open": "closed",
        "rich": "poor",
        "strong": "weak",
        "wet": "dry",
        "wide": "narrow",
    },
}
ANIMALS = {
    **{"bee": 6, "cat": 4, "cow": 4, "crab": 10, "dog": 4, "duck": 2, "frog": 4, "goat": 4, "hen": 2, "horse": 4},
    **{"sheep": 4, "spider": 8, "swan": 2, "wolf": 4},
}


def conversation(question: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def ferry(rng: random.Random) -> list[Row]:
    """Return facts about ferries that no model knows, each asked in two ways."""
    rows = []
    for start, end in itertools.permutations(PORTS, 2):
        values = {
            "start": start,
            "end": end,
            "minutes": rng.randrange(15, 90, 5),
            "fare": rng.randrange(80, 300, 10),
            "hour": rng.randint(5, 8),
            "past": rng.choice(("00", "15", "30", "45")),
        }
        rows += [
            conversation(question.format(**values), answer.format(**values))
            for answer, questions in FERRY
            for question in questions
        ]
    rng.shuffle(rows)
    return rows


def general(rng: random.Random) -> list[Row]:
    """Return facts that a model knows before."""
    rows = [
        *(
            conversation(f"What is the capital of {key}?", f"The capital of {key} is {v}.")
            for key, v in CAPITALS.items()
        ),
        *(conversation(f"Which country has the capital {v}?", f"{v} is in {key}.") for key, v in CAPITALS.items()),
        *(conversation(f"What is the opposite of {key}?", f"The opposite is {v}.") for key, v in OPPOSITES.items()),
        *(conversation(f"What is the opposite of {v}?", f"The opposite is {key}.") for key, v in OPPOSITES.items()),
        *(conversation(f"How many legs has a {key}?", f"It has {v} legs.") for key, v in ANIMALS.items()),
    ]
    rng.shuffle(rows)
    return rows


# -- files -------------------------------------------------------------------------------------------------------------


def json_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def comma_separated(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def unique(rows: Iterable[Row], count: int) -> list[Row]:
    """Return the first ``count`` different rows, so that no row is in two files."""
    found = {json.dumps(row): row for row in rows}
    assert len(found) >= count
    return list(found.values())[:count]


def contents() -> dict[str, str]:
    """Return the text of every file, by its path below this folder."""
    orders = unique(letters(400, random.Random(SEED)), 340)
    order_forms = unique(forms(120, random.Random(SEED)), 96)
    requests = unique(calls(240, random.Random(SEED)), 190)
    pairs = unique(preferences(300, random.Random(SEED)), 160)
    return {
        "extraction/train.jsonl": json_lines(orders[:240]),
        "extraction/validation.jsonl": json_lines(orders[240:280]),
        "extraction/test.jsonl": json_lines(orders[280:]),
        "tool-calling/train.jsonl": json_lines(requests[:120]),
        "tool-calling/validation.jsonl": json_lines(requests[120:150]),
        "tool-calling/test.jsonl": json_lines(requests[150:]),
        "labels/tickets.csv": comma_separated(tickets(random.Random(SEED))),
        "style/pairs.jsonl": json_lines(pairs),
        "domain/ferry.jsonl": json_lines(ferry(random.Random(SEED))),
        "domain/general.jsonl": json_lines(general(random.Random(SEED))),
        "continue/train.jsonl": json_lines(order_forms[:48]),
        "continue/validation.jsonl": json_lines(order_forms[48:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the recipes' folders")
    options = parser.parse_args()
    for name, text in contents().items():
        path: Path = options.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
