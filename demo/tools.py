"""Generator of tools, of questions that need them, and of the correct tool calls.

The demo model learns from them to call tools in the Hermes format, as Qwen2.5 does.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo.chat import Message, Tool
from demo.countries import countries
from demo.text import english_sentence, made_up_word, pick


def _city(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.4:
        city = pick(rng, "cities")
    elif draw < 0.75:
        city = rng.choice(countries()).capital["en"]
    else:
        city = " ".join(made_up_word(rng).capitalize() for _ in range(rng.choice((1, 1, 2))))
    return f"{city}, {pick(rng, 'states')}" if rng.random() < 0.15 else city


def _phrase(rng: random.Random) -> str:
    words = [pick(rng, "adjectives") for _ in range(rng.randint(0, 2))]
    return " ".join([*words, pick(rng, "nouns")])


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHKLMNPQRSTUVWXYZ", k=rng.randint(1, 4)))
    return f"{letters}{rng.choice(('', '-'))}{rng.randint(1, 9999)}"


def _person(rng: random.Random) -> str:
    return pick(rng, "people") if rng.random() < 0.8 else made_up_word(rng).capitalize()


# Generator of random values for each type of parameter. In a tool call, an integer is a JSON
# number, and any other value is a string.
VALUES: dict[str, Callable[[random.Random], str | int]] = {
    "city": _city,
    "country": lambda rng: rng.choice(countries()).names["en"][0].removeprefix("the "),
    "person": _person,
    "phrase": _phrase,
    "sentence": lambda rng: english_sentence(rng).rstrip(".!? "),
    "integer": lambda rng: rng.randint(0, 10 ** rng.randint(1, 4)),
    "code": _code,
    "word": lambda rng: pick(rng, "nouns") if rng.random() < 0.6 else made_up_word(rng),
    "unit": lambda rng: rng.choice(("celsius", "fahrenheit")),
    "language": lambda rng: rng.choice(
        ("French", "German", "Spanish", "Chinese", "Japanese", "Italian", "Korean")
    ),
    "currency": lambda rng: rng.choice(("USD", "EUR", "JPY", "CNY", "GBP", "CHF", "INR")),
    "time": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
    "date": lambda rng: f"20{rng.randint(20, 39)}-{rng.randint(10, 12)}-{rng.randint(10, 28)}",
    "email": lambda rng: f"{pick(rng, 'people').lower()}@{made_up_word(rng)}.com",
}


@dataclass(frozen=True)
class Param:
    """A parameter of a tool. Each generated schema uses one of its ``names``.

    ``kind`` is the type of its value, a key of ``VALUES``.
    """

    names: tuple[str, ...]
    kind: str
    description: str


@dataclass(frozen=True)
class ToolKind:
    """A tool in many variants: each example uses one of its names, descriptions and questions.

    ``{0}`` and ``{1}`` in a question stand for the values of its parameters. If a question has no
    ``{1}``, the call omits the second parameter.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[Param, ...]
    questions: tuple[str, ...]


def _kind(
    names: str, descriptions: str, params: Sequence[tuple[str, str, str]], *ask: str
) -> ToolKind:
    return ToolKind(
        tuple(names.split()),
        tuple(descriptions.split("|")),
        tuple(Param(tuple(n.split()), kind, text) for n, kind, text in params),
        ask,
    )


_PLACE = ("city location place city_name town", "city", "The city, for example San Francisco, CA")
_UNIT = ("unit units temperature_unit scale", "unit", "Temperature unit")
_WEATHER = (
    "What is the weather in {0}?", "What's the weather in {0}?", "How is the weather in {0} today?",
    "What is the weather like in {0}?", "What's the weather like in {0} today?",
    "Weather in {0}?", "Tell me the weather in {0}.", "Is it raining in {0}?",
    "What is the current weather in {0}?", "Check the weather in {0}.",
    "What is the temperature in {0}?", "How warm is it in {0} right now?",
    "What is the weather in {0} in {1}?", "How is the weather in {0}? Use {1}.",
    "Give me the temperature in {0} in {1}.",
)  # fmt: skip
KINDS = (
    _kind("get_weather get_current_weather weather getWeather current_weather get_temperature "
          "fetch_weather weather_lookup get_weather_forecast",
          "Get the current weather in a given location|Get the weather for a city|"
          "Returns the weather|Get current temperature for a given location.",
          (_PLACE, _UNIT), *_WEATHER),
    _kind("get_time get_current_time current_time local_time time_in_city",
          "Get the current time in a city|Returns the local time", (_PLACE,),
          "What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}.",
          "What is the local time in {0} now?", "Current time in {0}?"),
    _kind("get_population population city_population", "Get the number of people in a place",
          (_PLACE,), "How many people live in {0}?", "What is the population of {0}?"),
    _kind("get_stock_price stock_price get_quote", "Get the price of a stock",
          (("symbol ticker stock company", "code", "Stock symbol"),),
          "What is the stock price of {0}?", "How much is {0} stock?", "Price of {0} shares?",
          "What does {0} trade at?"),
    _kind("convert_currency currency_converter exchange", "Convert money between currencies",
          (("amount value", "integer", "How much to convert"),
           ("from_currency source from", "currency", "Currency to convert from"),
           ("to_currency target to", "currency", "Currency to convert to")),
          "Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "What are {0} {1} in {2}?"),
    _kind("set_timer start_timer timer", "Start a timer",
          (("minutes duration_minutes duration", "integer", "Length in minutes"),),
          "Set a timer for {0} minutes.", "Start a {0} minute timer.", "Timer for {0} minutes!"),
    _kind("set_alarm create_alarm", "Set an alarm", (("time at alarm_time", "time", "HH:MM"),),
          "Set an alarm for {0}.", "Wake me up at {0}.", "I need an alarm at {0}."),
    _kind("send_email send_mail email", "Send an email",
          (("to recipient address", "email", "Email address"),
           ("subject title", "phrase", "Subject of the email"),),
          "Send an email to {0}.", "Send an email to {0} about {1}.", "Write a mail to {0}."),
    _kind("send_message message_user text_contact", "Send a message to a person",
          (("to recipient name contact", "person", "Who gets it"),
           ("text message body content", "sentence", "What it says")),
          "Send a message to {0}: {1}", "Tell {0}: {1}", "Write to {0}: {1}", "Message {0}: {1}"),
    _kind("translate translate_text", "Translate text into a language",
          (("text content", "sentence", "Text to translate"),
           ("language target_language to", "language", "Language to translate into")),
          'Translate "{0}" into {1}.', "Translate to {1}: {0}", 'How do you say "{0}" in {1}?'),
    _kind("web_search search search_web google", "Search the web",
          (("query q search_query", "phrase", "What to search for"),),
          "Search the web for {0}.", "Search for {0}.", "Google {0}.", "Find pages about {0}."),
    _kind("get_news news latest_news", "Get the latest news on a topic",
          (("topic subject about", "phrase", "Topic of the news"),),
          "What is the latest news about {0}?", "News about {0}?", "Show me news on {0}."),
    _kind("play_music play_song play", "Play music",
          (("title song track name", "phrase", "Title of the song"),
           ("artist by", "person", "Who plays it")),
          "Play {0}.", "Play {0} by {1}.", "Put on the song {0} by {1}."),
    _kind("turn_on_light lights_on switch_on_light", "Turn on the light in a room",
          (("room location", "word", "Name of the room"),),
          "Turn on the light in the {0}.", "Switch on the {0} light.", "Light on in the {0}!"),
    _kind("create_reminder add_reminder remind", "Create a reminder",
          (("text title task", "phrase", "What to remember"),
           ("date day when", "date", "Date as YYYY-MM-DD")),
          "Remind me of the {0}.", "Remind me of the {0} on {1}.", "Add a reminder: {0}"),
    _kind("get_distance distance", "Distance between two cities",
          (("origin start from_city", "city", "First city"),
           ("destination end to_city", "city", "Second city")),
          "How far is it from {0} to {1}?", "What is the distance between {0} and {1}?"),
    _kind("search_flights find_flights flights", "Search for flights",
          (("origin departure from_city", "city", "Departure city"),
           ("destination arrival to_city", "city", "Arrival city"),
           ("date day departure_date", "date", "Date as YYYY-MM-DD")),
          "Find a flight from {0} to {1}.", "Find flights from {0} to {1} on {2}.",
          "I want to fly from {0} to {1} on {2}."),
    _kind("get_order_status order_status track_order", "Get the status of an order",
          (("order_id order id", "code", "Number of the order"),),
          "What is the status of order {0}?", "Where is my order {0}?", "Track order {0}."),
    _kind("get_definition define dictionary", "Look up the meaning of a word",
          (("word term", "word", "The word"),),
          'What does "{0}" mean?', "Define {0}.", "What is the definition of {0}?"),
    _kind("find_recipe get_recipe recipe_search", "Find a recipe for a dish",
          (("dish food name", "phrase", "Name of the dish"),),
          "Find a recipe for {0}.", "How do I cook {0}?", "I want to cook {0}."),
    _kind("book_table reserve_table", "Book a table in a restaurant",
          (("restaurant place name", "word", "Name of the restaurant"),
           ("people guests party_size", "integer", "How many people"),
           ("time at", "time", "HH:MM")),
          "Book a table at {0} for {1} people.", "Reserve a table at {0} for {1} at {2}."),
    _kind("add_numbers add sum calculator_add", "Add two numbers with a calculator",
          (("a x first", "integer", "First number"), ("b y second", "integer", "Second number")),
          "Use the calculator to add {0} and {1}.", "Add {0} and {1} with the tool.",
          "What is {0} + {1}?", "What is {0} plus {1}?", "Add {0} and {1}.", "{0} + {1}",
          "Calculate {0} + {1}.", "How much is {0} plus {1}?"),
)  # fmt: skip
# Tools that are not in the training examples. The evaluation measures whether the model can call
# them.
UNSEEN_KINDS = (
    _kind("get_horoscope", "Get the horoscope for a sign", (("sign", "word", "Star sign"),),
          "What is the horoscope for {0}?", "Get the horoscope for {0}."),
    _kind("get_air_quality", "Get the air quality index of a city",
          (("municipality", "city", "Name of the municipality"),),
          "What is the air quality in {0}?", "How is the air quality in {0} today?"),
    _kind("get_invoice_total", "Get the total of an invoice",
          (("invoice_number", "code", "Number of the invoice"),),
          "What is the total of invoice {0}?", "Get the invoice total for {0}."),
    _kind("lock_door", "Lock a door", (("door_name", "word", "Which door"),),
          "Lock the {0} door.", "Please lock the {0} door."),
    _kind("set_volume", "Set the volume", (("level", "integer", "Volume level"),),
          "Set the volume to {0}.", "Change the volume to {0}."),
    _kind("create_ticket", "Create a support ticket",
          (("summary", "phrase", "Summary of the ticket"),),
          "Create a ticket: {0}", "Create a support ticket for {0}."),
)  # fmt: skip
# Phrasings of an invented tool's task: {v} is a verb, {n} a noun, {p} a preposition, {x} a value.
_TASKS = (
    "{v} the {n} {p} {x}", "{v} {n} {p} {x}", "{v} the {x} {n}", "{v} {x}'s {n}", "{v} the {n} {x}",
    "{v} the {n} to {x}", "{v} {n} {x}", "{v} a {n}: {x}", "{v} a new {n} {p} {x}",
    "{v} {n}: {x}",
)  # fmt: skip
_ORDERS = ("{t}.", "{t}.", "{t}", "please {t}.", "can you {t}?", "I want to {t}.", "could you {t}?",
           "{t}, please.", "I would like to {t}.", "you should {t}.")  # fmt: skip
_QUESTIONS = (
    "What is the {n} {p} {x}?", "What's the {n} {p} {x}?", "How is the {n} {p} {x} today?",
    "How is the {n} {p} {x}?", "Tell me the {n} {p} {x}.", "What is {x}'s {n}?",
    "Which {n} has {x}?", "Where is the {n} {p} {x}?", "Do you know the {n} {p} {x}?",
    "Give me the {n} {p} {x}.",
    "How much {n} is there {p} {x}?", "{n} {p} {x}?", "I need the {n} {p} {x}.",
    "Is there {n} {p} {x}?", "What is the {m} of {n} {x}?", "What is the {n} of {m} {x}?",
)  # fmt: skip
_KINDS = ("city", "person", "phrase", "code", "word", "integer", "integer", "country", "date")


def _any_word(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return made_up_word(rng)
    return pick(rng, rng.choice(("nouns", "nouns", "nouns", "adjectives", "commands")))


def _invented_kind(rng: random.Random) -> ToolKind:
    """Return a random tool, whose name is made of a verb and nouns.

    As in real requests, the user's question may have another verb, or not all of the nouns.
    """
    verb = made_up_word(rng) if rng.random() < 0.1 else pick(rng, "commands")
    said_verb = verb if rng.random() < 0.75 else pick(rng, "commands")
    nouns = [_any_word(rng) for _ in range(rng.choice((1, 1, 2)))]
    kinds = [rng.choice(_KINDS) for _ in range(rng.choice((1, 1, 1, 2)))]
    said = nouns if rng.random() < 0.7 else [rng.choice(nouns)]
    asks = rng.random() < 0.45
    if asks:
        verb = rng.choice(("get", "get", "fetch", "find", "show", "lookup", verb))
    form = rng.choice(_QUESTIONS if asks else _TASKS)
    ask = form.format(
        v=said_verb,
        n=" ".join(said),
        m=pick(rng, "nouns"),
        x="{0}",
        p=rng.choice(("of", "for", "in", "from", "on", "with")),
    )
    if not asks:
        ask = rng.choice(_ORDERS).format(t=ask)
    if len(kinds) == 2:
        between = rng.choice(("and", "with", "to", "by", "at"))
        ask = re.sub(r"([.?]?)$", rf" {between} {{1}}\1", ask, count=1)
    name = "_".join([verb, *nouns])
    if rng.random() < 0.2:
        name = verb + "".join(noun.capitalize() for noun in nouns)
    params: list[Param] = []
    for kind in kinds:
        noun = rng.choice((nouns[0], _any_word(rng)))
        ending = rng.choice(("_name", "_id", "_number", "_type", "_value"))
        key = rng.choice((noun, noun, noun + ending, "id", "name", kind, made_up_word(rng)))
        if key not in [param.names[0] for param in params]:
            params.append(Param((key,), kind, rng.choice((f"The {key}", f"{noun} {ending[1:]}"))))
    what = " ".join(nouns)
    texts = (
        f"{verb.capitalize()} the {what}",
        f"{verb.capitalize()}s a {what} by {params[0].names[0]}",
    )
    if len(params) < len(kinds):
        return _invented_kind(rng)
    return ToolKind((name,), texts, tuple(params), (ask[0].upper() + ask[1:],))


@dataclass(frozen=True)
class Use:
    """A use of a tool: its schema, a question that needs the tool, and the correct tool calls."""

    tool: Tool
    question: str
    calls: list[Message]


def random_kind(rng: random.Random) -> ToolKind:
    draw = rng.random()
    if draw < 0.2:
        return KINDS[0]
    return _invented_kind(rng) if draw < 0.55 else rng.choice(KINDS)


def use(rng: random.Random, kind: ToolKind) -> Use:
    """Return a random variant of the tool's schema, a question, and the correct tool calls.

    A parameter that the question does not mention is optional in the schema, or missing.
    """
    name = rng.choice(kind.names)
    question = rng.choice(kind.questions)
    named = sum(f"{{{i}}}" in question for i in range(len(kind.params)))
    offered = kind.params[: named if rng.random() < 0.5 else None]
    params = [(rng.choice(param.names), param) for param in offered]
    needed = [i for i in range(len(params)) if all(f"{{{i}}}" in q for q in kind.questions)]
    tool = _schema(rng, name, rng.choice(kind.descriptions), params, needed)
    times = 1
    if question.endswith("{0}?") and "{1}" not in question and rng.random() < 0.18:
        times = rng.choice((2, 2, 3))
    draws = [[VALUES[param.kind](rng) for _, param in params] for _ in range(times)]
    asked = question.format(*draws[0])
    if times > 1:
        more = [str(values[0]) for values in draws[1:]]
        last = rng.choice((" and ", " and ", ", and " if times == 3 else " and ")) + more.pop()
        asked = "".join([asked.removesuffix("?"), *(f", {value}" for value in more), last, "?"])
    if rng.random() < 0.1:
        asked = rng.choice(("Please ", "Hello! ", "Can you help me? ")) + asked
    given = [(i, key) for i, (key, _) in enumerate(params) if f"{{{i}}}" in question]
    calls: list[Message] = [
        {"function": {"name": name, "arguments": {key: values[i] for i, key in given}}}
        for values in draws
    ]
    return Use(tool, asked, calls)


def _schema(
    rng: random.Random,
    name: str,
    description: str,
    params: list[tuple[str, Param]],
    needed: list[int],
) -> Tool:
    properties: dict[str, Any] = {}
    described = rng.random() < 0.6
    for key, param in params:
        properties[key] = {"type": "integer" if param.kind == "integer" else "string"}
        if param.kind == "unit":
            properties[key]["enum"] = ["celsius", "fahrenheit"]
        if described:
            properties[key]["description"] = param.description
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [params[i][0] for i in needed]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = description
    function["parameters"] = parameters
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def result(rng: random.Random) -> tuple[str, str]:
    """Return a random tool result, and the words with which the final answer reports the result.

    The result is a JSON object or plain text.
    """
    if rng.random() < 0.3:
        weather = f"{rng.randint(-9, 40)} degrees and {pick(rng, 'adjectives')}"
        sentence = english_sentence(rng).rstrip(".!? ")
        text = rng.choice((weather, sentence, str(rng.randint(-20, 9999))))
        return text, text
    keys = ["temperature", "unit", "condition", "time", "status", "price", "result", "city"]
    keys += [pick(rng, "nouns") for _ in range(4)]
    keys.append(f"{pick(rng, 'nouns')}_{pick(rng, 'nouns')}")
    makers = [VALUES[k] for k in ("integer", "integer", "word", "phrase", "code", "city", "time")]
    fields = {key: rng.choice(makers)(rng) for key in rng.sample(keys, rng.randint(1, 4))}
    told = ", ".join(f"{key} {value}" for key, value in fields.items())
    compact = (",", ":") if rng.random() < 0.3 else (", ", ": ")
    return json.dumps(fields, ensure_ascii=False, separators=compact), told
