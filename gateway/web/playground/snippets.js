// Code that sends a request: curl, Python with `openai`, JavaScript.
//
// It reads the key from an environment variable, because copied code may be published.

export const LANGUAGES = { curl: "curl", python: "Python", javascript: "JavaScript" };

// Parameters of `openai`'s method; others go into its `extra_body`.
const KNOWN = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "presence_penalty",
  "frequency_penalty", "seed", "stop", "response_format", "tools", "tool_choice", "logprobs", "top_logprobs"]);

// Returns true if the program must print more than the answer's text.
const isMore = (body) => Boolean(body.tools || body.logprobs);

export function snippet(language, body, base) {
  return { curl, python, javascript }[language](body, base.replace(/\/$/, ""));
}

function curl(body, base) {
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -sS ${quoted(`${base}/chat/completions`)} \\
  -H "Authorization: Bearer \${OPENAI_API_KEY:-none}" \\
  -H 'Content-Type: application/json' \\
  -d '${data}'
`;
}

const quoted = (text) => (/^[\w:/.-]+$/.test(text) ? text : `'${text}'`);

function python(body, base) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  if (Object.keys(others).length) known.push(["extra_body", others]);
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  const shown = isMore(body) ? "answer.choices[0].model_dump_json(indent=2)" : "answer.choices[0].message.content";
  return `import os

from openai import OpenAI

client = OpenAI(
    base_url=${JSON.stringify(base)},
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
answer = client.chat.completions.create(
${lines})
print(${shown})
`;
}

// Returns a JSON value as a Python literal. Strings are the same in both.
function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((one) => literal(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, deeper)}`);
  const [open, close] = isList ? "[]" : "{}";
  const flat = parts.join(", ");
  if (flat.length < 72 && !flat.includes("\n")) return `${open}${flat}${close}`;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}

function javascript(body, base) {
  const shown = isMore(body) ? "JSON.stringify(answer.choices[0], null, 2)" : "answer.choices[0].message.content";
  return `const response = await fetch(${JSON.stringify(`${base}/chat/completions`)}, {
  method: "POST",
  headers: {
    "Authorization": \`Bearer \${process.env.OPENAI_API_KEY ?? "none"}\`,
    "Content-Type": "application/json",
  },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
if (!response.ok) throw new Error(await response.text());
const answer = await response.json();
console.log(${shown});
`;
}
