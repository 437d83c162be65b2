"""Questions on programming, mathematics and general topics, which are made from templates.

They were written for this package, and train drafters for instruction-tuned models without any download.
"""

import random
import re
from collections.abc import Mapping, Sequence

from ..conversations import Conversation, Turn

_CODE = r'''
Write a Python function that {task}.
Write a Python function `{name}` that {task}. Return only the code.
Write a {language} function that {task}, and explain how it works.
How do I write {language} code that {task}?
Complete this Python function:\n\ndef {name}({argument}):\n    """Function that {task}."""
Write three unit tests with pytest for a function `{name}` that {task}.
My function `{name}` should be one that {task}, but it is slow for large inputs. How can I make it faster?
Write a Python class for {thing} with methods to add, remove and list {items}. Include type hints and docstrings.
Write a {language} program that reads {items} from a file, and {task2}.
Write an SQL query that returns the {n} most recent {items} of each customer, with their total price.
Which data structure should I use for {thing}, and what is the complexity of its operations?
Refactor this code:\n\nfor i in range(len({items})):\n    if {items}[i] == {n}:\n        print({items}[i])
What does `{snippet}` do in Python? Show an example with {items}.
'''
_MATHEMATICS = """
{a} has {m}0 {goods} and gives {t} of them to each of {s} friends. How many {goods} does {a} have left?
{a} saves ${n} a week for {t} weeks, then spends {p}% of the savings. How much money is left?
{a} reads {s} pages of a book per day, and {b} reads {t} pages per day. After how many days have they read {m}0 pages?
A bus drives {m} km at {n} km per hour and returns at {n2} km per hour. What is its average speed?
A rectangle is {n} cm long and {t} cm wide. Compute its area, its perimeter and the length of its diagonal.
A shop sells {goods} at ${t} each, with a discount of {p}% for more than {s}. What do {n} {goods} cost?
Solve {s}x + {m} = {k} for x. Show every step.
Solve the equation x^2 - {sum}x + {product} = 0.
Compute the derivative of f(x) = {s}x^{t} + {n}x - {m}, and evaluate it at x = 2.
Compute the integral of {s}x^2 + {t}x from 0 to {p}.
Two dice are rolled. What is the probability that the sum is at least {t}?
In how many ways can a committee of {s} people be chosen from {t2} people?
The mean of {s} numbers is {n}. If {m} is added to the list, what is the new mean?
What is the remainder when {m}^{s} is divided by {t}? Explain your reasoning.
Simplify the fraction {m}/{k}, and write it as a decimal and as a percentage.
{a} is {s} years older than {b}. In {t} years, the sum of their ages will be {m}. How old is each of them now?
Find the slope of the line through the points ({s}, {m}) and ({n}, {t}), and the equation of the line.
A tank of {m}0 litres loses {t} litres per hour and gains {s} litres per hour. When is it empty?
"""
_CHAT = """
Explain {topic} to a {reader}.
What are the advantages and disadvantages of {topic}? Answer as a list.
Write a short article about {topic} with a title and three paragraphs.
Give me {s} practical tips about {topic}.
I am a {reader}, and I have to give a talk about {topic}. Suggest an outline.
Compare {topic} with {topic2} in a table.
What is the most common misunderstanding about {topic}?
Write a friendly email to a {reader} about {topic}.
Pretend that you are a {reader}. What do you think about {topic}?
Write a poem of {s} lines about {topic}.
Describe the history of {topic} in about {n}0 words.
Ask me {s} quiz questions about {topic}, with the correct answers at the end.
How does {topic} affect everyday life? Give an example for a {reader}.
"""
_VALUES = {
    "task": """returns the {t}th largest number in a list of integers
        merges two sorted linked lists|counts how often each word occurs in a text, ignoring case
        checks whether brackets, braces and quotes in a string are balanced|converts a Roman numeral to an integer
        finds the longest run of equal characters in a string|rotates a square matrix by 90 degrees
        flattens a nested list to at most {s} levels|parses a line of comma-separated values with quoted fields
        returns all dates between two dates that fall on a weekend|computes a moving average over {n} values
        groups a list of dictionaries by a key and sums another key|validates an email address
        finds the shortest path in a grid with obstacles|removes duplicates from a list but keeps its order
        encodes a string with run-length encoding|computes the edit distance of two words
        splits a list into chunks of size {s}|reverses the words of a sentence but keeps the punctuation
        retries a function up to {s} times with exponential backoff|caches the results of slow calls for {n} seconds
        converts a temperature between Celsius and Fahrenheit|evaluates an arithmetic expression in postfix notation
        finds all pairs of numbers that add up to {m}|draws a random sample of {n} rows from a large file
        computes the determinant of a matrix|performs a binary search in a rotated array
        compresses an image to a width of {m}0 pixels|formats a number of bytes as KB, MB or GB
        topologically sorts a graph of dependencies|checks whether two strings are anagrams of each other""",
    "task2": """prints the {s} longest lines|writes them to a JSON file, sorted by name|sums the values of column {s}
        reports the lines that occur more than {t} times|plots a histogram with {n} bins""",
    "name": "process|solve|compute|transform|find_items|run_task|convert_value|parse_input|build_result|handle",
    "argument": "values|text: str|items: list[int]|data: dict[str, int]|n: int, limit: int = 10",
    "language": "Python|JavaScript|TypeScript|Java|C++|Go|Rust|C#|Ruby|Bash",
    "thing": """a shopping cart|a priority queue|an address book|a library catalogue|an LRU cache|a bank account
        an undo history|a playlist|a parking garage|a task scheduler|a tournament table|a spell checker|a chat room""",
    "items": """orders|books|users|tickets|songs|invoices|photos|messages|recipes|sensors|files|students""",
    "goods": "apples|books|marbles|stamps|pencils|tickets|cookies|bricks|postcards|lemons|candles|beads",
    "snippet": """sorted(items, key=lambda x: x[1])[:{s}]|dict(zip(keys, values))|[x for row in rows for x in row]
        any(map(str.isdigit, text))|collections.Counter(items).most_common({s})|values[::-{s}]|itertools.groupby(x)""",
    "a": "Maya|Liam|Priya|Omar|Elena|Kenji|Sofia|Lukas|Amara|Felix|Ingrid|Mateo|Zara|Ravi",
    "b": "Hugo|Nina|Farid|Clara|Bruno|Leila|Oscar|Wanda|Pavel|Rosa|Yuki|Simon",
    "topic": """photosynthesis|inflation|public libraries|remote work|vaccines|black holes|electric cars|chess openings
        time zones|the printing press|recycling|machine translation|meditation|volcanoes|tax returns|coral reefs
        the Silk Road|video compression|bread baking|urban gardening|supply chains|jazz|plate tectonics|solar panels
        voting systems|antibiotics|open-source software|sleep|the water cycle|password managers|marathon training
        the Roman road network|search engines|wildfires|board games|second-hand clothing|bilingual education
        the stock market|noise pollution|renewable heating|encryption|migratory birds|architecture of bridges
        the Renaissance|gravity|public transport|coffee|the human immune system|databases|negotiation|earthquakes""",
    "reader": """ten-year-old|software engineer|retired teacher|nurse|high school student|chef|small business owner
        journalist|gardener|travel guide|lawyer|new parent|physicist|novelist""",
}  # fmt: skip
_TEMPLATES = {"code": _CODE, "mathematics": _MATHEMATICS, "chat": _CHAT}
_ATTEMPTS = 50  # mean number of draws per question, after which the templates are considered exhausted


def template_questions(count: int, seed: int = 0) -> list[Conversation]:
    """Return `count` different questions, a third each on code, mathematics and general topics, without answers.

    Raises ValueError if the templates do not yield so many different questions.
    """
    rng, questions = random.Random(seed), dict[str, str]()
    templates = {kind: text.strip("\n").split("\n") for kind, text in _TEMPLATES.items()}
    values = {name: [item.strip() for item in re.split(r"[|\n]", text)] for name, text in _VALUES.items()}
    for number in range(_ATTEMPTS * count):
        if len(questions) == count:
            break
        kind = tuple(templates)[len(questions) % len(templates)]
        questions.setdefault(_fill(rng.choice(templates[kind]), values, rng), f"{kind}-{number}")
    if len(questions) < count:
        raise ValueError(
            f"the templates yield {len(questions):,} different questions, but {count:,} were requested: request fewer"
        )
    return [Conversation(name, (Turn("user", text),)) for text, name in questions.items()]


def _fill(template: str, values: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Replace the placeholders of a template with random values, which may contain placeholders for numbers."""
    low, high = sorted(rng.sample(range(2, 10), 2))
    chosen = {name: rng.choice(items) for name, items in values.items()}
    chosen["topic2"] = rng.choice([topic for topic in values["topic"] if topic != chosen["topic"]])
    ranges = {"m": (40, 99), "n": (10, 39), "n2": (40, 80), "p": (5, 30), "k": (100, 400), "t2": (10, 14)}
    numbers = {name: rng.randint(*limits) for name, limits in ranges.items()} | {"s": low, "t": high}
    numbers |= {"sum": low + high, "product": low * high}
    text = template.replace(r"\n", "\n")
    for _ in range(2):
        text = re.sub(r"{(\w+)}", lambda match: str({**chosen, **numbers}[match[1]]), text)
    return text
