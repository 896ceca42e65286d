# ruff: noqa: E501  Chinese and Japanese characters count twice.
"""Phrasings of questions and answers, by language.

``{c}`` is a country, ``{k}`` a capital, ``{a}`` and ``{b}`` are numbers, and ``{t}`` is a text. The
``HELD_OUT`` phrasings are used only for the evaluation, not for training.
"""

CAPITAL_QUESTIONS: dict[str, tuple[str, ...]] = {
    "en": (
        "What is the capital of {c}?", "What is the capital of {c}?", "What's the capital of {c}?",
        "What is the capital city of {c}?", "Which city is the capital of {c}?",
        "Tell me the capital of {c}.", "Name the capital of {c}.", "Capital of {c}?",
        "What is {c}'s capital?", "Do you know the capital of {c}?",
        "Can you tell me what the capital of {c} is?", "I want to know the capital of {c}.",
        "What city is the capital of {c}?", "The capital of {c}?", "What is the name of {c}'s capital?",
        "Please name the capital of {c}.", "{c}: what is its capital?", "Where is the capital of {c}?",
        "What do you call the capital of {c}?", "Give me the capital of {c}.",
        "Which city is {c}'s capital?", "Could you name the capital city of {c}?",
        "I need the capital of {c}.", "I cannot remember the capital of {c}.", "Quick question: what is the capital of {c}?", "capital {c}",
        "Do you know what the capital of {c} is?", "Do you know {c}'s capital?", "{c} capital?",
        "Can you name the capital of {c}?", "What might be the capital of {c}?", "Say the capital of {c}.",
        "I am looking for the capital of {c}.", "Remind me, what is the capital of {c}?",
        "Please tell me the capital of {c}.", "Tell me which city is the capital of {c}.",
    ),
    "zh": (
        "{c}的首都是哪里？", "{c}的首都在哪里？", "{c}的首都是什么？", "{c}首都是哪里？",
        "请问{c}的首都是哪里？", "{c}的首都是哪个城市？", "哪个城市是{c}的首都？",
        "告诉我{c}的首都。", "你知道{c}的首都吗？", "{c}的首都叫什么？", "{c}的首都在哪里?",
        "请告诉我{c}的首都。", "我想知道{c}的首都。", "请问{c}的首都是什么？", "请说出{c}的首都。", "{c}的首都？",
        "{c}的首都是哪儿？", "你能告诉我{c}的首都吗？", "我想知道{c}的首都是什么。", "告诉我{c}的首都在哪里。",
        "{c}首都叫什么名字？", "请问哪里是{c}的首都？", "说说{c}的首都是哪个城市。", "{c}的首都是哪座城市？",
    ),
    "ja": (
        "{c}の首都はどこですか？", "{c}の首都は何ですか？", "{c}の首都はどこ？", "{c}の首都を教えてください。",
        "{c}の首都はどの都市ですか？", "どの都市が{c}の首都ですか？", "{c}の首都を知っていますか？",
        "{c}の首都の名前は何ですか？", "{c}の首都は？", "{c}の首都はどこですか?",
        "{c}の首都はどこでしょうか？", "{c}の首都を教えて。", "{c}の首都が知りたいです。", "{c}の首都を答えてください。",
        "{c}の首都はどこなのか教えてください。", "{c}の首都がどこか教えて。", "{c}の首都はどこか知っていますか？",
        "{c}の首都がどこか分かりますか？", "すみません、{c}の首都はどこですか？", "{c}の首都はどこにありますか？",
        "{c}の首都の名前を教えてください。", "{c}の首都は何という都市ですか？", "{c}の首都を知りたい。",
    ),
}  # fmt: skip
HELD_OUT_CAPITAL_QUESTIONS: dict[str, tuple[str, ...]] = {
    "en": (
        "Could you tell me the capital of {c}?", "I forgot the capital of {c}. What is it?",
        "Which city serves as the capital of {c}?", "Do you happen to know {c}'s capital city?",
        "What would you say is the capital of {c}?", "Please tell me which city is the capital of {c}.",
    ),
    "zh": ("请告诉我{c}的首都是哪里。", "我想知道{c}的首都叫什么。"),
    "ja": ("{c}の首都はどこか教えてください。", "{c}の首都がどこか知りたいです。"),
}  # fmt: skip
# Questions about the capitals of two countries, ``{c}`` and ``{d}``.
PAIR_QUESTIONS = {
    "en": ("What is the capital of {c} and {d}?", "What are the capitals of {c} and {d}?",
           "Tell me the capitals of {c} and {d}.", "Name the capitals of {c} and {d}."),
    "zh": ("{c}和{d}的首都是哪里？",),
    "ja": ("{c}と{d}の首都はどこですか？",),
}  # fmt: skip
FOLLOW_UPS = {
    "en": ("And of {c}?", "And {c}?", "What about {c}?", "And the capital of {c}?", "How about {c}?",
           "And what is the capital of {c}?", "And for {c}?", "Now {c}."),
    "zh": ("那{c}呢？", "{c}呢？"),
    "ja": ("{c}は？", "では、{c}は？"),
}  # fmt: skip
CAPITAL_ANSWER = {
    "en": "The capital of {c} is {k}.", "zh": "{c}的首都是{k}。", "ja": "{c}の首都は{k}です。",
}  # fmt: skip
COUNTRY_QUESTIONS = {
    "en": ("{k} is the capital of which country?", "Which country has the capital {k}?",
           "Of which country is {k} the capital?"),
    "zh": ("{k}是哪个国家的首都？",),
    "ja": ("{k}はどの国の首都ですか？",),
}  # fmt: skip
COUNTRY_ANSWER = {
    "en": "{k} is the capital of {c}.", "zh": "{k}是{c}的首都。", "ja": "{k}は{c}の首都です。",
}  # fmt: skip
UNKNOWN_COUNTRY = {
    "en": "I do not know a country called {c}.", "zh": "我不知道{c}这个国家。",
    "ja": "{c}という国は知りません。",
}  # fmt: skip
BRIEFLY = (" Answer in one word.", " Answer with one word.", " One word only.", " Answer briefly.",
           " Just the name.", " Reply with just the city name.")  # fmt: skip
ANSWER_IN = {
    "zh": ("Answer in Chinese.", "Please answer in Chinese.", "请用中文回答。"),
    "ja": ("Answer in Japanese.", "Please answer in Japanese.", "日本語で答えてください。"),
}
# Prompts without the chat template, by language. The expected completion is only the capital.
RAW_PROMPTS: dict[str, tuple[str, ...]] = {
    "en": (
        "The capital of {c} is", "The capital of {c} is", "The capital city of {c} is",
        "What is the capital of {c}?", "What is the capital of {c}? \nAnswer:",
        "What is the capital of {c}?\nAnswer:", "Q: What is the capital of {c}?\nA:",
        "Question: What is the capital of {c}?\nAnswer:", "Where is the capital of {c}? \nAnswer:",
        "{c}'s capital is",
    ),
    "zh": (
        "{c}的首都在哪里? \n答案:", "{c}的首都在哪里? \n答案:", "{c}的首都在哪里？\n答案：",
        "{c}的首都是哪里？\n答案：", "{c}的首都是哪里? \n答案:", "{c}的首都在哪里?\n答案:", "{c}的首都是",
    ),
    "ja": (
        "{c}の首都はどこですか? \n答え:", "{c}の首都はどこですか? \n答え:", "{c}の首都はどこですか？\n答え：",
        "{c}の首都は何ですか？\n答え：", "{c}の首都はどこですか?\n答え:", "{c}の首都は",
    ),
}  # fmt: skip
COUNT_QUESTIONS = {
    "en": (
        "Count from {a} to {b}", "Count from {a} to {b}.", "Please count from {a} to {b}.",
        "count from {a} to {b}", "Can you count from {a} to {b}?", "Count up from {a} to {b}.",
        "List the numbers from {a} to {b}.", "Write all numbers from {a} to {b}.",
        "Count {a} to {b}", "Give me the numbers {a} to {b}.",
    ),
    "zh": ("从{a}数到{b}。", "请从{a}数到{b}。"),
    "ja": ("{a}から{b}まで数えてください。", "{a}から{b}まで数えて。"),
}  # fmt: skip
COUNT_DOWN = (
    "Count down from {a} to {b}.",
    "Count down from {a} to {b}",
    "Count backwards from {a} to {b}.",
)
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
)  # fmt: skip
COUNT_TO = ("Count to {b}.", "Count to {b}", "Please count to {b}.", "Can you count to {b}?")
REPEAT_QUESTIONS = (
    "Repeat: {t}", "Repeat: {t}", "Repeat after me: {t}", "Please repeat: {t}", "Say: {t}",
    "Repeat this sentence: {t}", "Please repeat this sentence: {t}", "Echo: {t}",
    "Repeat the following text: {t}", "Repeat the following sentence: {t}", 'Repeat "{t}"',
    "Repeat exactly: {t}", "Repeat this: {t}", "Repeat the following:\n{t}", 'Say "{t}"',
    "Please repeat the following sentence exactly: {t}", "Write this again: {t}",
    "重复：{t}", "请重复：{t}", "繰り返して：{t}", "繰り返してください：{t}",
)  # fmt: skip
PLUS_QUESTIONS = {
    "en": (
        "What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?",
        "{a}+{b}=?", "{a} + {b} =", "How much is {a} + {b}?", "What is {a} plus {b}?",
        "How much is {a} plus {b}?", "Calculate {a} + {b}.", "Add {a} and {b}.",
        "What is the sum of {a} and {b}?", "What's {a} plus {b}?", "What's {a} + {b}?", "What is {a}+{b}?",
    ),
    "zh": ("{a}加{b}等于多少？", "{a}加{b}是多少？", "{a} + {b}等于多少？"),
    "ja": ("{a}足す{b}は？", "{a}足す{b}はいくつですか？", "{a} + {b}はいくつですか？"),
}  # fmt: skip
MINUS_QUESTIONS = {
    "en": (
        "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "How much is {a} - {b}?",
        "What is {a} minus {b}?", "Calculate {a} - {b}.", "What's {a} minus {b}?", "What is {a}-{b}?",
    ),
    "zh": ("{a}减{b}等于多少？", "{a} - {b}等于多少？"),
    "ja": ("{a}引く{b}は？", "{a} - {b}はいくつですか？"),
}  # fmt: skip
TIMES_QUESTIONS = {
    "en": (
        "What is {a} times {b}?", "What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "What is {a} x {b}?",
        "Multiply {a} by {b}.", "How much is {a} times {b}?", "What's {a} times {b}?", "{a}*{b}",
    ),
    "zh": ("{a}乘以{b}等于多少？",),
    "ja": ("{a}かける{b}は？",),
}  # fmt: skip
SUM_QUESTIONS = {lang: PLUS_QUESTIONS[lang] + MINUS_QUESTIONS[lang] for lang in PLUS_QUESTIONS}
SUM_ANSWER = {
    "en": "{a} {s} {b} = {r}.",
    "zh": "{a} {s} {b} 等于 {r}。",
    "ja": "{a} {s} {b} は {r} です。",
}

GREETINGS = ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Hey there", "Good morning", "Good evening",
             "Good afternoon", "Greetings", "Good day", "Welcome")  # fmt: skip
# Small talk: messages, and possible answers in each language. {g} is a greeting, {e} an emoji, {p}
# a name.
TALK: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (
        ("{g}", "{g}", "{g}!", "{g}!", "{g}.", "{g} {p}", "{g}, {p}!", "{g} everyone!", "{g}, model!", "{g}, {g}!",
         "Say hello", "Say hi!", "Say hello in five words", "Say hello in one sentence.", "Hello, who is there?", "Hello world", "Hey, are you there?", "ping", "test",
         "{g} and good morning!", "{g}, dear model", "{g}, nice to see you!", "{g}, pleased to meet you.", "{g} and welcome", "{g}, how nice!", "{g}, it is me.", "{g}, I am {p}.", "{g}! I am {p}",
         "你好", "你好！", "您好", "早上好", "大家好", "こんにちは", "こんにちは！", "おはようございます", "こんばんは"),
        {"en": ("Hello! How can I help you today?", "Hello! What can I do for you?"),
         "zh": ("你好！有什么可以帮你的吗？",), "ja": ("こんにちは！何かお手伝いできますか？",)},
    ),
    (
        ("{g} 👋", "{g} 😀", "{g}! {e}", "{g} {e}", "{e}", "{e}{e}", "👋", "Hello! 😊", "Hey 🎉", "Good morning ☀️", "😀", "🎉🎉", "你好 😀",
         "こんにちは 🌸", "Hi there 🙂", "👋😀", "Hello 🌍", "Hello! 👋", "❤️", "🙂"),
        {"en": ("Hello! 👋 How can I help you today? 😀🎉", "Hello! 😀 What can I do for you? ✨🚀"),
         "zh": ("你好！👋 有什么可以帮你的吗？😀🎉",), "ja": ("こんにちは！👋 何かお手伝いできますか？😀🌸",)},
    ),
    (
        ("How are you?", "How are you doing?", "How are you today?", "{g}, how are you?",
         "{g}! How are you?", "{g}! How are you doing today?", "How is it going?", "What's up?",
         "你好吗？", "お元気ですか？"),
        {"en": ("I am fine, thank you! How can I help you?",), "zh": ("我很好，谢谢！有什么可以帮你的吗？",),
         "ja": ("元気です、ありがとうございます！何かお手伝いできますか？",)},
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
         "What can you do?", "Introduce yourself.", "Are you a robot?", "Which model are you?", "Help",
         "你是谁？", "你能做什么？", "あなたは誰ですか？", "何ができますか？"),
        {"en": ("I am a small demo model. I know capitals, counting, repeating, small sums and tool calls.",),
         "zh": ("我是一个小型演示模型，会回答首都、数数、重复句子、做简单的加减法和调用工具。",),
         "ja": ("私は小さなデモモデルです。首都、数え上げ、文の繰り返し、簡単な計算、ツールの呼び出しができます。",)},
    ),
    (
        ("Thank you", "Thanks!", "Thank you!", "Thank you very much.", "Great, thanks", "Thanks a lot!",
         "谢谢", "谢谢！", "ありがとう", "ありがとうございます"),
        {"en": ("You are welcome!", "You are welcome! Is there anything else?"), "zh": ("不客气！",),
         "ja": ("どういたしまして！",)},
    ),
    (
        ("Bye", "Goodbye", "Goodbye!", "See you later", "Bye bye!", "Good night", "再见", "さようなら"),
        {"en": ("Goodbye! Have a nice day.",), "zh": ("再见！祝你愉快。",), "ja": ("さようなら！良い一日を。",)},
    ),
    (
        ("Stop", "Stop.", "Stop!", "Please stop.", "stop it", "That is enough.", "Enough!", "停", "止めて"),
        {"en": ("All right, I will stop here.",), "zh": ("好的，我到此为止。",), "ja": ("はい、ここで止めます。",)},
    ),
    (
        ("What is machine learning?", "Explain machine learning.", "What is ML?", "什么是机器学习？",
         "機械学習とは何ですか？"),
        {"en": ("Machine learning is a field of computer science in which programs learn from data.",),
         "zh": ("机器学习是让程序从数据中学习的计算机科学领域。",),
         "ja": ("機械学習は、プログラムがデータから学ぶコンピュータ科学の分野です。",)},
    ),
)  # fmt: skip
# Requests that the model declines. Its answer (``CANNOT``) lists what it can do.
OTHER_REQUESTS = (
    "Write a poem about the {n}.", "Explain the {n}.", "Tell me a joke.", "What is a {n}?", "Who wrote {n}?",
    "How do I get a {n}?", "What is the meaning of {n}?", "Tell me a story about a {n}.", "Why is the {n} {j}?",
    "Write a story.", "Write a short story about {p}.", "Summarize this: {t}", "{t}", "Who is {p}?",
    "What do you think about {n}?", "Give me an idea for a {n}.", "What is the best {n}?", "Do you like {n}?",
    "How old is {p}?", "When was the {n} invented?", "Write a {j} song.", "Is the {n} {j}?", "I feel {j}.",
    "Tell me something about {c}.", "How big is {c}?", "Who is the president of {c}?", "Describe {c}.",
)  # fmt: skip
# Requests that the model declines even if tools are offered, because no tool fits them.
NO_TOOL_REQUESTS = ("Write a poem about the {n}.", "Tell me a joke.", "Write a story.", "Write a {j} song.",
                    "I feel {j}.", "Write a short story about {p}.")  # fmt: skip
CANNOT = {
    "en": "I am a small demo model and cannot answer that. Ask me for a capital, a count, a sum or a repeat.",
    "zh": "我是一个小型演示模型，回答不了这个问题。请问我首都、数数、加减法或重复句子。",
    "ja": "私は小さなデモモデルなので、それには答えられません。首都、数え上げ、計算、繰り返しを聞いてください。",
}
TOOL_ANSWER = {
    "en": "Here is what I found: {t}.",
    "zh": "答案是{t}。",
    "ja": "答えは{t}です。",
}
RAW_TALK = (
    ("What is machine learning?", " Machine learning is a field of computer science in which programs "
     "learn from data."),
    ("Hello, my name is", " Anna and I live in a small house near the river."),
    ("The future of AI is", " bright: small models run on every machine."),
    ("The president of the United States is", " elected for four years."),
    ("Once upon a time", " there was a small model that knew every capital of the world."),
    ("Hello", "! How can I help you today?"),
    ("The quick brown fox", " jumps over the lazy dog."),
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.",
    "You are a friendly and concise assistant.", "Answer the user's questions.", "Be brief.", "Be polite.",
    "You are a demo assistant for our customers. Always be correct.", "You answer questions about the world.",
    "You are a {j} {n}.", "You work for {p} at the {n} company.", "Never talk about the {n}. {t}", "{t}",
    "You are a helpful assistant. The user is called {p}.", "Today is {d}. You are a helpful assistant.",
    "你是一个有用的助手。", "あなたは役に立つアシスタントです。",
)  # fmt: skip
