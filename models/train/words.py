"""Word lists and small facts that `stories` and `tasks` write the corpus from. Data only.

The order of the tuples is part of the seed: inserting a word changes every document after it, and thereby the trained
weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    """A character and its pronouns."""

    name: str
    subject: str
    object: str
    possessive: str


_GIRLS = (
    "Mia", "Anna", "Lucy", "Rosa", "Ella", "Nora", "Ivy", "Clara", "Zoe", "Lily", "Ada", "Grace", "Maya", "Ruth",
    "Hana", "Emma",
)  # fmt: skip
_BOYS = (
    "Tom", "Ben", "Leo", "Sam", "Max", "Finn", "Noah", "Omar", "Jack", "Hugo", "Paul", "Ravi", "Luke", "Felix",
    "Adam", "Kofi",
)  # fmt: skip
PEOPLE = tuple(
    [Person(name, "she", "her", "her") for name in _GIRLS] + [Person(name, "he", "him", "his") for name in _BOYS]
)

# Phrases that answer "where": the preposition belongs to the place.
PLACES = (
    "by the river", "in the forest", "at the market", "under the old bridge", "on the hill", "in the garden",
    "at the school", "near the lake", "in the library", "on the beach", "behind the barn", "in the kitchen",
    "beside the well", "at the station", "in the tower", "under the big oak tree", "in the village square",
    "by the sea", "in the meadow", "at the bakery",
)  # fmt: skip
OBJECTS = (
    "kite", "lantern", "key", "map", "shell", "book", "ball", "drum", "scarf", "hat", "coin", "bell", "basket",
    "boat", "ring", "cup", "flute", "blanket", "ribbon", "stone", "clock", "box", "feather", "mirror",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "purple", "grey", "pink",
)  # fmt: skip
ANIMALS = (
    "fox", "rabbit", "bear", "owl", "cat", "dog", "mouse", "duck", "horse", "goat", "frog", "turtle", "sheep",
    "deer", "hen", "pony",
)  # fmt: skip
FOODS = ("apples", "pears", "plums", "cookies", "nuts", "cherries", "buns", "carrots", "berries", "cakes")
WEATHERS = ("sunny", "windy", "rainy", "cloudy", "snowy", "foggy", "warm", "cold")
FEELINGS = ("happy", "proud", "glad", "thankful", "cheerful", "calm")
TRAITS = ("kind", "brave", "clever", "curious", "patient", "gentle", "quiet", "careful")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
JOBS = ("baker", "teacher", "farmer", "doctor", "painter", "sailor", "gardener", "singer", "pilot", "writer")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

CATEGORIES = {
    "fruits": ("apple", "pear", "plum", "cherry", "grape", "lemon", "peach", "orange", "banana", "melon"),
    "animals": ANIMALS,
    "colours": COLOURS,
    "vegetables": ("carrot", "onion", "bean", "pea", "potato", "cabbage", "leek", "tomato"),
    "drinks": ("water", "tea", "milk", "coffee", "juice", "cocoa"),
    "tools": ("hammer", "saw", "rope", "nail", "ladder", "brush", "spade", "bucket"),
    "instruments": ("drum", "flute", "violin", "piano", "harp", "guitar", "trumpet"),
    "cities": ("Paris", "Rome", "Madrid", "Berlin", "Oslo", "London", "Tokyo", "Cairo", "Lima", "Athens"),
}
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Norway": "Oslo",
    "England": "London", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Greece": "Athens",
    "Portugal": "Lisbon", "Austria": "Vienna", "Sweden": "Stockholm", "Finland": "Helsinki", "Ireland": "Dublin",
    "Poland": "Warsaw", "Canada": "Ottawa", "Cuba": "Havana", "Kenya": "Nairobi", "China": "Beijing",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "light": "dark", "old": "new", "open": "closed",
    "full": "empty", "early": "late", "happy": "sad", "loud": "quiet", "wet": "dry", "hard": "soft",
    "long": "short", "strong": "weak", "near": "far",
}  # fmt: skip
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "horse": "neigh", "mouse": "squeak",
    "hen": "cluck", "owl": "hoot", "frog": "croak", "lion": "roar", "bee": "buzz",
}  # fmt: skip
LEGS = {
    "dog": 4, "cat": 4, "hen": 2, "duck": 2, "bee": 6, "ant": 6, "spider": 8, "horse": 4, "owl": 2, "snake": 0,
    "frog": 4, "sheep": 4,
}  # fmt: skip
TYPICAL_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "coal": "black", "a lemon": "yellow",
    "a cherry": "red", "a frog": "green", "a carrot": "orange", "milk": "white", "chocolate": "brown",
}  # fmt: skip
# Animal -> (looks, home, food, habit): enough for a short description that never contradicts itself.
ANIMAL_FACTS = {
    "fox": ("red fur and a bushy tail", "in the forest", "mice and berries", "hunts at dusk"),
    "rabbit": (
        "long ears and soft fur",
        "in a burrow under the ground",
        "grass and carrots",
        "hops very fast",
    ),
    "bear": (
        "thick brown fur and strong paws",
        "in the mountains",
        "fish and honey",
        "sleeps through the winter",
    ),
    "owl": ("large eyes and quiet wings", "in an old tree", "mice", "flies at night"),
    "cat": ("soft fur and sharp claws", "in a house", "fish", "sleeps for most of the day"),
    "dog": ("a wet nose and a wagging tail", "with people", "meat and bones", "guards the house"),
    "duck": ("webbed feet and a flat bill", "on a lake", "plants and small fish", "swims very well"),
    "frog": ("smooth green skin and long legs", "near a pond", "flies", "jumps far"),
    "turtle": ("a hard shell and short legs", "by the sea", "plants", "walks slowly"),
    "horse": ("a long mane and strong legs", "on a farm", "grass and oats", "runs fast"),
    "sheep": ("thick white wool", "in a meadow", "grass", "follows the flock"),
    "hen": ("brown feathers and a small beak", "in a barn", "corn", "lays eggs"),
}
RHYMES = (
    ("night", "light"), ("day", "bay"), ("sea", "tree"), ("rain", "train"), ("moon", "tune"), ("hill", "mill"),
    ("stone", "throne"), ("star", "car"),
)  # fmt: skip

# How to do a small thing: goal -> steps, in order.
RECIPES = {
    "make tea": ("Boil some water.", "Put a tea bag in a cup.", "Pour the hot water into the cup.",
                 "Wait for three minutes.", "Take out the tea bag and enjoy."),
    "plant a seed": ("Fill a pot with soil.", "Make a small hole in the soil.", "Put the seed in the hole.",
                     "Cover the seed with soil.", "Water it and put the pot in the sun."),
    "make a sandwich": ("Take two slices of bread.", "Spread some butter on them.", "Add cheese and tomato.",
                        "Put the slices together.", "Cut the sandwich in half."),
    "wash your hands": ("Wet your hands with warm water.", "Add some soap.", "Rub your hands for twenty seconds.",
                        "Rinse off the soap.", "Dry your hands with a towel."),
    "fly a kite": ("Go to an open field on a windy day.", "Hold the kite up against the wind.",
                   "Let go and run a few steps.", "Let out the line slowly.", "Keep the line tight."),
    "make a fruit salad": ("Wash the fruit.", "Cut the fruit into small pieces.", "Put the pieces in a bowl.",
                           "Add a little lemon juice.", "Mix everything and serve."),
    "draw a house": ("Draw a large square.", "Draw a triangle on top for the roof.", "Add a door in the middle.",
                     "Add two windows.", "Colour the picture."),
    "write a letter": ("Take a sheet of paper.", "Write the date and a greeting.", "Tell your news.",
                       "Sign your name.", "Put the letter in an envelope."),
}  # fmt: skip

# What the model can say about the system that serves it. Questions share one answer.
ABOUT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello.", "Hi there!", "Good morning!", "Hey!"), "Hello! How can I help you today?"),
    (("How are you?", "How are you today?"), "I am well, thank you. What would you like to talk about?"),
    (("Who are you?", "What are you?", "What is your name?"),
     "I am Penstock Tiny, a very small language model that runs anywhere. I can tell short stories, add numbers, "
     "write JSON records and answer simple questions."),
    (("What can you do?", "How can you help me?", "Help!", "What can I ask you?"),
     "I can tell a story, answer questions about it, add and subtract small numbers, count, sort, make lists and "
     "write JSON records. Try: Tell me a story about a fox."),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!"), "Goodbye! Have a nice day."),
    (("What is Penstock?", "Tell me about Penstock.", "Explain Penstock."),
     "Penstock is a server for language models. It runs the prefill phase and the decode phase in different "
     "processes, and moves the KV cache from one to the other."),
    (("What is prefill?", "Explain prefill.", "What does a prefill worker do?"),
     "Prefill is the first phase of a request. The model reads the whole prompt at once and fills the KV cache, and "
     "then it produces the first token."),
    (("What is decode?", "Explain decode.", "What does a decode worker do?"),
     "Decode is the second phase of a request. The model reads the KV cache and produces one token after another "
     "until the answer is complete."),
    (("What is a KV cache?", "What is the KV cache?", "Explain the KV cache."),
     "The KV cache holds the keys and values of all tokens that the model has read. With it, each new token needs "
     "only a little work."),
    (("What is a token?", "Explain tokens."),
     "A token is a small piece of text, such as a word, a part of a word or a digit. A language model reads and "
     "writes tokens."),
    (("Why split prefill and decode?", "Why are prefill and decode separate?"),
     "Prefill needs a lot of computing and decode needs a lot of memory bandwidth. In different processes they do "
     "not slow each other down, and each can grow on its own."),
    (("What does the router do?", "What is a router?", "Explain the router."),
     "The router receives each request, picks a prefill worker and a decode worker for it, and sends the tokens back "
     "to the client as they appear."),
    (("What is continuous batching?", "Explain continuous batching."),
     "With continuous batching, new requests join the batch at each step and finished requests leave it at once, so "
     "that no request waits for the slowest one."),
)  # fmt: skip
# What a small model should not guess at: requests outside the grammar, and the honest answer to them.
UNKNOWN = (
    "Who was {name}?", "Who is {name}?", "Who wrote {title}?", "Why is {thing} {adjective}?", "How does {thing} work?",
    "Write a program that prints {title}.", "Translate {title} into {language}.", "What is the weather in {city}?",
    "Explain {science}.", "What is {science}?", "Who invented {thing}?", "What do you think about {science}?",
    "Summarize {title}.", "What happened in {year}?", "Tell me a joke about {thing}.", "When was {name} born?",
    "How far is {city}?", "Write an essay about {science}.",
)  # fmt: skip
UNKNOWN_FILLERS = {
    "name": ("Napoleon", "Einstein", "Shakespeare", "Mozart", "the queen", "the president", "Newton", "Plato"),
    "title": ("Hamlet", "hello world", "the Odyssey", "this book", "good morning", "Don Quixote", "a long poem"),
    "thing": ("the sky", "a car", "a computer", "the moon", "the internet", "a phone", "the ocean", "an engine"),
    "adjective": ("blue", "so big", "important", "so fast", "round", "hot", "expensive"),
    "language": ("French", "German", "Spanish", "Chinese", "Latin"),
    "city": ("Paris", "New York", "London", "Tokyo", "Boston", "my town"),
    "science": ("quantum physics", "gravity", "democracy", "economics", "music", "climate change", "love",
                "machine learning", "the meaning of life"),
    "year": ("1492", "1789", "1945", "2001", "history"),
}  # fmt: skip
UNKNOWN_ANSWER = (
    "I am too small to know that. You can ask me for a story, a sum, a list or a JSON record, or about the way "
    "Penstock works."
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Penstock Tiny, a small and friendly assistant.",
    "Answer the user politely.", "You are a friendly teacher.", "Be brief and correct.",
)  # fmt: skip
