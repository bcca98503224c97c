"""A small grammar of stories whose facts are known, so that questions about them have one right answer.

`story` samples a scene (people, places, things), then one or more plots over it. A plot returns its sentences and the
question-answer pairs that hold after them. Names and pronouns come from the scene, so that every "she" is unambiguous.
Pure functions of the random generator passed in: no I/O, no state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from models.train import words


@dataclass(frozen=True)
class Scene:
    """The people, places and things that all plots of a story share."""

    rng: random.Random
    hero: words.Person
    friend: words.Person
    animal: str
    thing: str
    colour: str
    place: str
    other_place: str
    day: str

    @property
    def coloured(self) -> str:
        return f"{self.colour} {self.thing}"

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)


@dataclass(frozen=True)
class Episode:
    """The sentences of one plot, and the facts that they establish as (question, answer)."""

    sentences: list[str]
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Story:
    """A story. `prompts` are requests that this story answers better than others."""

    title: str
    paragraphs: list[str]
    facts: list[tuple[str, str]]
    prompts: list[str]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


def sample_scene(rng: random.Random) -> Scene:
    hero, friend = rng.sample(words.PEOPLE, 2)
    place, other_place = rng.sample(words.PLACES, 2)
    return Scene(
        rng, hero, friend, rng.choice(words.ANIMALS), rng.choice(words.OBJECTS), rng.choice(words.COLOURS),
        place, other_place, rng.choice(words.DAYS),
    )  # fmt: skip


def _lost_and_found(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    feeling = s.rng.choice(words.FEELINGS)
    sentences = [
        s.pick(
            f"{h.name} had {article(s.coloured)} and took it everywhere.",
            f"{h.name} loved {h.possessive} {s.coloured} more than anything.",
        ),
        s.pick(f"One day the {s.thing} was gone.", f"On {s.day} {h.subject} lost the {s.thing}."),
        s.pick(
            f"First {h.subject} looked {s.other_place}, but it was not there.",
            f"{upper_first(h.subject)} looked {s.other_place} and found nothing.",
        ),
        s.pick(f'"I will help you," said {f.name}.', f"Then {f.name} came to help."),
        f"Together they looked {s.place}.",
        s.pick(f"There {f.name} saw something {s.colour}.", f"There was the {s.coloured}!"),
        f"{h.name} was {feeling} and thanked {f.name}.",
    ]
    facts = [
        (f"What did {h.name} lose?", f"{h.name} lost {article(s.coloured)}."),
        (f"Who helped {h.name}?", f"{f.name} helped {h.name}."),
        (f"Where did they find the {s.thing}?", f"They found the {s.thing} {s.place}."),
        (f"What colour was the {s.thing}?", f"The {s.thing} was {s.colour}."),
        (f"How did {h.name} feel at the end?", f"{h.name} was {feeling}."),
    ]
    return Episode(sentences, facts)


def _gift(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    verb = s.pick("made", "bought")
    sentences = [
        s.pick(f"It was {f.name}'s birthday on {s.day}.", f"On {s.day} {f.name} had a birthday."),
        f"{h.name} {verb} {article(s.coloured)} for {f.object}.",
        s.pick(
            f"{upper_first(h.subject)} hid it {s.place}.",
            f"To keep it a secret, {h.subject} hid it {s.place}.",
        ),
        s.pick(f'"Close your eyes and follow me," said {h.name}.', f'"Come with me," said {h.name}.'),
        f"When {f.name} saw the {s.thing}, {f.subject} {s.pick('smiled', 'laughed', 'clapped')}.",
        s.pick(f'"It is the best gift of all," said {f.name}.', f'"Thank you, {h.name}!" said {f.name}.'),
    ]
    facts = [
        ("Whose birthday was it?", f"It was {f.name}'s birthday."),
        (f"What did {h.name} give to {f.name}?", f"{h.name} gave {f.name} {article(s.coloured)}."),
        (f"Where did {h.name} hide the {s.thing}?", f"{h.name} hid the {s.thing} {s.place}."),
        (f"What colour was the {s.thing}?", f"The {s.thing} was {s.colour}."),
        ("On which day was the birthday?", f"The birthday was on {s.day}."),
    ]
    return Episode(sentences, facts)


def _sharing(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    food = s.rng.choice(words.FOODS)
    total = s.rng.randint(3, 10)
    given = s.rng.randint(1, total - 2)
    sentences = [
        s.pick(f"{h.name} had {total} {food} in a basket.", f"{h.name} picked {total} {food}."),
        f"{upper_first(h.subject)} met {f.name} {s.place}.",
        s.pick(f"{f.name} was hungry.", f"{f.name} had nothing to eat."),
        s.pick(
            f"So {h.name} gave {f.object} {given} of the {food}.",
            f"{h.name} gave {given} of the {food} to {f.name}.",
        ),
        f"Now {h.name} had {total - given} {food} left.",
        s.pick("They sat down and ate together.", "They ate and talked until the evening."),
    ]
    facts = [
        (f"How many {food} did {h.name} have at first?", f"{h.name} had {total} {food} at first."),
        (f"How many {food} did {h.name} give away?", f"{h.name} gave away {given} {food}."),
        (
            f"How many {food} were left?",
            f"{total} - {given} = {total - given}, so {total - given} {food} were left.",
        ),
        (f"Where did {h.name} meet {f.name}?", f"{h.name} met {f.name} {s.place}."),
        ("Who was hungry?", f"{f.name} was hungry."),
    ]
    return Episode(sentences, facts)


def _animal_friend(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    food = s.rng.choice(words.FOODS)
    name = s.pick("Rusty", "Dot", "Pip", "Bobo", "Misty", "Sunny")
    sentences = [
        s.pick(
            f"{upper_first(s.place)}, {h.name} met a little {s.animal}.",
            f"{h.name} found a little {s.animal} {s.place}.",
        ),
        s.pick(
            f"The {s.animal} was {s.pick('lost', 'cold', 'hungry', 'tired')} and alone.",
            f"The {s.animal} had lost its way.",
        ),
        f"{h.name} gave it some {food} and called it {name}.",
        s.pick(f"Then {h.subject} asked {f.name} for help.", f'"What should we do?" {h.subject} asked {f.name}.'),
        f"They made a warm bed for {name} {s.other_place}.",
        s.pick("From that day on, the three were friends.", f"Soon {name} felt at home."),
    ]
    facts = [
        (f"What animal did {h.name} meet?", f"{h.name} met a little {s.animal}."),
        (f"What was the name of the {s.animal}?", f"The name of the {s.animal} was {name}."),
        (f"What did {name} eat?", f"{name} ate some {food}."),
        (f"Where was the bed of {name}?", f"The bed of {name} was {s.other_place}."),
        (f"Where did {h.name} find the {s.animal}?", f"{h.name} found the {s.animal} {s.place}."),
    ]
    return Episode(sentences, facts)


def _storm(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    sentences = [
        s.pick(
            f"On {s.day} {h.name} and {f.name} were {s.place}.",
            f"{h.name} and {f.name} walked together {s.place}.",
        ),
        s.pick("Dark clouds came up and it began to rain.", "Suddenly the wind grew strong and it began to rain."),
        s.pick(f'"We need a dry place," said {f.name}.', f'"Let us run!" said {f.name}.'),
        f"They ran and found shelter {s.other_place}.",
        f"{h.name} had {article(s.coloured)}, and it kept them {s.pick('busy', 'cheerful', 'calm')}.",
        s.pick("When the sun came out, they saw a rainbow.", "After an hour the storm was over and the birds sang."),
    ]
    facts = [
        ("Where did they find shelter?", f"They found shelter {s.other_place}."),
        (f"What did {h.name} have?", f"{h.name} had {article(s.coloured)}."),
        (f"Who was with {h.name}?", f"{f.name} was with {h.name}."),
        ("Where were they when the rain began?", f"They were {s.place}."),
    ]
    return Episode(sentences, facts)


def _building(s: Scene) -> Episode:
    h, f = s.hero, s.friend
    made = s.pick("a small house", "a bridge", "a tree house", "a boat", "a tall tower", "a swing")
    trait = s.rng.choice(words.TRAITS)
    what = made.split()[-1]
    sentences = [
        f"{h.name} wanted to build {made} {s.place}.",
        s.pick(f"{upper_first(h.subject)} worked all day.", f"The work was hard, but {h.name} did not give up."),
        s.pick(f"Then the {what} fell down.", f"But the wind blew and the {what} broke."),
        f"{f.name} was {trait} and had a good idea.",
        f"They used {s.pick('strong rope', 'old wood', 'flat stones', 'long nails')} and tied a {s.coloured} on top.",
        s.pick(f"This time the {what} was strong.", f"Now the {what} stood still, and everyone came to see it."),
    ]
    facts = [
        (f"What did {h.name} want to build?", f"{h.name} wanted to build {made}."),
        ("Who had a good idea?", f"{f.name} had a good idea."),
        (f"Where did {h.name} build the {what}?", f"{h.name} built the {what} {s.place}."),
        ("What did they tie on top?", f"They tied a {s.coloured} on top."),
    ]
    return Episode(sentences, facts)


_PLOTS: tuple[Callable[[Scene], Episode], ...] = (
    _lost_and_found,
    _gift,
    _sharing,
    _animal_friend,
    _storm,
    _building,
)
_MORALS = (
    "It is good to share.", "A friend is better than gold.", "Small steps lead far.", "Kind words cost nothing.",
    "Never give up too soon.", "Together everything is easier.",
)  # fmt: skip


def _opening(s: Scene, trait: str, job: str) -> str:
    h = s.hero
    person = f"{article(trait)} {'girl' if h.subject == 'she' else 'boy'} named {h.name}"
    home = s.pick("in a small village", "in a house near the sea", "at the edge of a town", "on a farm")
    return s.pick(
        f"Once upon a time there was {person} who lived {home}.",
        f"There once was {person}. {upper_first(h.subject)} lived {home}.",
        f"{h.name} was {article(trait)} {job} who lived {home}.",
    )


def story(rng: random.Random, num_plots: int = 1) -> Story:
    """Returns a story of `num_plots` plots with one hero and one friend; its facts are those of the last plot."""
    scene = sample_scene(rng)
    hero, friend = scene.hero, scene.friend
    trait, job = rng.choice(words.TRAITS), rng.choice(words.JOBS)
    paragraphs: list[str] = []
    facts: list[tuple[str, str]] = []
    first = scene
    for index, plot in enumerate(rng.sample(_PLOTS, num_plots)):
        if index > 0:
            scene = replace(sample_scene(rng), hero=hero, friend=friend)
        episode = plot(scene)
        start = (
            _opening(scene, trait, job) if index == 0 else scene.pick("The next day", "A week later", "Later that year")
        )
        glue = " " if index == 0 else ", something new happened. "
        paragraphs.append(start + glue + " ".join(episode.sentences))
        facts = episode.facts
    if rng.random() < 0.4:
        paragraphs[-1] += " " + rng.choice(_MORALS)
    text = " ".join(paragraphs)
    title = f"{hero.name} and {f'the {first.coloured}' if first.coloured in text else friend.name}"
    return Story(title, paragraphs, facts, _prompts(first, text))


def _prompts(s: Scene, text: str) -> list[str]:
    """Returns requests that name only what the text contains."""
    tell = s.pick("Tell me a story", "Write a short story", "Please tell me a story", "Can you tell me a story")
    end = "?" if tell.startswith("Can") else "."
    prompts = [
        tell + end,
        f"{tell} about {s.hero.name}{end}",
        f"{tell} about {s.hero.name} and {s.friend.name}{end}",
    ]
    # Specific requests are more frequent, because they teach the model to follow the request.
    if f" {s.animal}" in text:
        prompts += [f"{tell} about {article(s.animal)}{end}"] * 8
    if s.coloured in text:
        prompts += [f"{tell} about {article(s.coloured)}{end}", f"{tell} about {article(s.thing)}{end}"] * 3
    return prompts
