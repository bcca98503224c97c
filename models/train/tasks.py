"""Questions with answers that a program can check: sums, counting, sorting, records, facts, lists and short texts.

Each task is a pure function from a random generator to one `Exchange`. `CHECKABLE` has the tasks whose answer follows
from the question alone; tests ask the trained model new questions of these and compare the answers exactly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from models.train import words
from models.train.stories import article, story, upper_first


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str


Task = Callable[[random.Random], Exchange]


def addition(rng: random.Random) -> Exchange:
    limit = rng.choice((10, 10, 20, 20, 50, 99))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    ask = rng.choice(("What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "{} + {} = ?", "Compute {} + {}."))
    return Exchange(ask.format(a, b), f"{a} + {b} = {a + b}.")


def subtraction(rng: random.Random) -> Exchange:
    limit = rng.choice((10, 10, 20, 20, 50))
    a, b = sorted((rng.randint(0, limit), rng.randint(0, limit)), reverse=True)
    ask = rng.choice(("What is {} - {}?", "What is {} minus {}?", "{} - {} = ?", "Compute {} - {}."))
    return Exchange(ask.format(a, b), f"{a} - {b} = {a - b}.")


def multiplication(rng: random.Random) -> Exchange:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    ask = rng.choice(("What is {} times {}?", "What is {} x {}?", "Multiply {} by {}."))
    return Exchange(ask.format(a, b), f"{a} x {b} = {a * b}.")


def comparison(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        return Exchange(f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")
    return Exchange(f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}.")


def counting(rng: random.Random) -> Exchange:
    start, length = rng.randint(0, 40), rng.randint(3, 12)
    step = rng.choice((1, 1, 1, 2, 5, 10, -1))
    if step < 0:
        start += length
        ask = f"Count down from {start} to {start - length + 1}."
    else:
        last = start + step * (length - 1)
        ask = f"Count from {start} to {last}" + ("." if step == 1 else f" in steps of {step}.")
    return Exchange(ask, ", ".join(str(start + step * i) for i in range(length)) + ".")


def sorting(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 30), rng.randint(3, 5))
    given = ", ".join(map(str, numbers))
    if rng.random() < 0.3:
        return Exchange(f"What is the largest number in {given}?", f"The largest number is {max(numbers)}.")
    return Exchange(f"Sort these numbers: {given}.", ", ".join(map(str, sorted(numbers))) + ".")


def sequence_fact(rng: random.Random) -> Exchange:
    cycle, kind = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    index = rng.randrange(len(cycle))
    if rng.random() < 0.5:
        return Exchange(
            f"Which {kind} comes after {cycle[index]}?",
            f"{cycle[(index + 1) % len(cycle)]} comes after {cycle[index]}.",
        )
    return Exchange(f"Which {kind} comes before {cycle[index]}?", f"{cycle[index - 1]} comes before {cycle[index]}.")


def fact(rng: random.Random) -> Exchange:
    kind = rng.randrange(6)
    if kind == 0:
        country, city = rng.choice(list(words.CAPITALS.items()))
        return Exchange(f"What is the capital of {country}?", f"The capital of {country} is {city}.")
    if kind == 1:
        pair = list(rng.choice(list(words.OPPOSITES.items())))
        rng.shuffle(pair)
        return Exchange(f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}.")
    if kind == 2:
        animal, sound = rng.choice(list(words.SOUNDS.items()))
        return Exchange(f"What does {article(animal)} say?", f"{upper_first(article(animal))} says {sound}.")
    if kind == 3:
        animal, legs = rng.choice(list(words.LEGS.items()))
        number = words.NUMBER_WORDS[legs] if legs else "no"
        return Exchange(
            f"How many legs does {article(animal)} have?",
            f"{upper_first(article(animal))} has {number} legs.",
        )
    if kind == 4:
        thing, colour = rng.choice(list(words.TYPICAL_COLOURS.items()))
        return Exchange(f"What colour is {thing}?", f"{upper_first(thing)} is {colour}.")
    animal, (_, home, food, _) = rng.choice(list(words.ANIMAL_FACTS.items()))
    if rng.random() < 0.5:
        return Exchange(f"Where does {article(animal)} live?", f"{upper_first(article(animal))} lives {home}.")
    return Exchange(f"What does {article(animal)} eat?", f"{upper_first(article(animal))} eats {food}.")


def json_record(rng: random.Random) -> Exchange:
    """Describes a person, an item or a booking in words; the answer is one JSON object."""
    person = rng.choice(words.PEOPLE)
    kind = rng.randrange(3)
    record: dict[str, object]
    if kind == 0:
        record = {"name": person.name, "age": rng.randint(5, 80), "job": rng.choice(words.JOBS)}
        ask = f"{person.name} is {record['age']} years old and works as {article(str(record['job']))}."
    elif kind == 1:
        record = {
            "item": rng.choice(words.OBJECTS),
            "colour": rng.choice(words.COLOURS),
            "price": rng.randint(1, 60),
        }
        ask = f"The {record['colour']} {record['item']} costs {record['price']} coins."
    else:
        record = {
            "name": person.name,
            "city": rng.choice(words.CATEGORIES["cities"]),
            "day": rng.choice(words.DAYS),
        }
        ask = f"{person.name} travels to {record['city']} on {record['day']}."
    verb = rng.choice(("Write this as JSON: ", "Make a JSON record: ", "Turn this into JSON: "))
    return Exchange(verb + ask, json.dumps(record))


def json_lookup(rng: random.Random) -> Exchange:
    record = json.loads(json_record(rng).answer)
    key = rng.choice(list(record))
    return Exchange(f"What is the {key} in {json.dumps(record)}?", f"The {key} is {record[key]}.")


def repeat(rng: random.Random) -> Exchange:
    chosen = rng.sample(words.OBJECTS + words.ANIMALS, rng.randint(2, 5))
    if rng.random() < 0.5:
        return Exchange(f"Repeat these words: {', '.join(chosen)}.", ", ".join(chosen) + ".")
    return Exchange(f"Write these words in reverse order: {', '.join(chosen)}.", ", ".join(chosen[::-1]) + ".")


def spelling(rng: random.Random) -> Exchange:
    word = rng.choice(words.ANIMALS + words.OBJECTS + words.COLOURS)
    return Exchange(f"Spell the word {word}.", "-".join(word.upper()) + ".")


def listing(rng: random.Random) -> Exchange:
    category = rng.choice(list(words.CATEGORIES))
    chosen = rng.sample(words.CATEGORIES[category], rng.randint(2, 6))
    number = words.NUMBER_WORDS[len(chosen)]
    if rng.random() < 0.5:
        return Exchange(f"List {number} {category}.", "\n".join(f"{i}. {w}" for i, w in enumerate(chosen, 1)))
    if rng.random() < 0.5:
        return Exchange(f"Give me {number} {category} as a JSON list.", json.dumps(chosen))
    return Exchange(f"Name {number} {category}.", ", ".join(chosen[:-1]) + f" and {chosen[-1]}.")


def recipe(rng: random.Random) -> Exchange:
    goal, steps = rng.choice(list(words.RECIPES.items()))
    ask = rng.choice(("How do I {}?", "How can I {}?", "Explain how to {}.", "Tell me how to {}."))
    return Exchange(ask.format(goal), "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)))


def description(rng: random.Random) -> Exchange:
    animal, (looks, home, food, habit) = rng.choice(list(words.ANIMAL_FACTS.items()))
    ask = rng.choice(("Describe {}.", "Tell me about {}.", "What is {}?"))
    text = f"{upper_first(article(animal))} is an animal with {looks}. It lives {home}, eats {food} and {habit}."
    return Exchange(ask.format(article(animal)), text)


def poem(rng: random.Random) -> Exchange:
    lines = []
    for first, second in rng.sample(words.RHYMES, 2):
        how, verb = (
            rng.choice(("Softly", "Gently", "Slowly", "Quietly")),
            rng.choice(("dreams", "sings", "thinks")),
        )
        lines.append(f"{how} {rng.choice(words.PEOPLE).name} speaks of the {first},")
        lines.append(f"and {verb} of the {rng.choice(words.COLOURS)} {second}.")
    return Exchange(rng.choice(("Write a poem.", "Write a short poem.", "Can you write a poem?")), "\n".join(lines))


def letter(rng: random.Random) -> Exchange:
    writer, reader = rng.sample(words.PEOPLE, 2)
    weather, place, thing = rng.choice(words.WEATHERS), rng.choice(words.PLACES), rng.choice(words.OBJECTS)
    text = (
        f"Dear {reader.name},\n\nToday it is {weather} here. I was {place} and thought of you. "
        f"I will bring you {article(thing)} on {rng.choice(words.DAYS)}.\n\nYour friend,\n{writer.name}"
    )
    return Exchange(f"Write a letter from {writer.name} to {reader.name}.", text)


def about(rng: random.Random) -> Exchange:
    questions, answer = rng.choice(words.ABOUT)
    return Exchange(rng.choice(questions), answer)


def unknown(rng: random.Random) -> Exchange:
    """Makes a request outside the grammar; the answer says so."""
    fillers = {field: rng.choice(options) for field, options in words.UNKNOWN_FILLERS.items()}
    return Exchange(rng.choice(words.UNKNOWN).format(**fillers), words.UNKNOWN_ANSWER)


def sum_sheet(rng: random.Random) -> str:
    """Returns rows of sums without questions, the densest practice of arithmetic."""
    task = rng.choice((addition, addition, subtraction, multiplication))
    return "\n".join(task(rng).answer for _ in range(rng.randint(8, 20)))


def reading(rng: random.Random) -> Exchange:
    written = story(rng)
    question, answer = rng.choice(written.facts)
    return Exchange(f"{written.text}\n\n{question}", answer)


CHECKABLE: dict[str, Task] = {
    "addition": addition, "subtraction": subtraction, "multiplication": multiplication, "comparison": comparison,
    "counting": counting, "sorting": sorting, "sequence_fact": sequence_fact, "fact": fact,
    "json_record": json_record, "json_lookup": json_lookup, "repeat": repeat, "spelling": spelling,
    "recipe": recipe, "description": description, "about": about, "unknown": unknown, "reading": reading,
}  # fmt: skip
OPEN_ENDED: dict[str, Task] = {"listing": listing, "poem": poem, "letter": letter}
WEIGHTS = {
    "addition": 7, "subtraction": 5, "multiplication": 3, "comparison": 3, "counting": 6, "sorting": 5,
    "sequence_fact": 4, "fact": 5, "json_record": 9, "json_lookup": 5, "repeat": 5, "spelling": 3, "recipe": 2,
    "description": 2, "about": 4, "unknown": 3, "reading": 8, "listing": 5, "poem": 2, "letter": 2,
}  # fmt: skip


def any_task(rng: random.Random) -> Exchange:
    """Returns one exchange of a weighted random kind."""
    (kind,) = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
    return (CHECKABLE | OPEN_ENDED)[kind](rng)
