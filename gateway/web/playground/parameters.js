// The parameters of a request: labels, validation, and conversion to the request's body.
//
// Values are the texts in the fields. If a field is empty, the parameter is omitted, and the server
// uses its default.

export const NUMBERS = {
  temperature: { label: "Temperature", least: 0, most: 2, step: 0.1, unset: "1" },
  top_p: { label: "Top p", least: 0, most: 1, step: 0.05, unset: "1" },
  top_k: { label: "Top k", least: -1, most: 1024, isInteger: true, unset: "off" },
  seed: {
    label: "Seed", least: Number.MIN_SAFE_INTEGER, most: Number.MAX_SAFE_INTEGER, isInteger: true,
    unset: "random",
  },
  max_tokens: { label: "Most tokens", least: 1, most: 2 ** 31 - 1, isInteger: true, unset: "what fits" },
  min_tokens: { label: "Fewest tokens", least: 0, most: 2 ** 31 - 1, isInteger: true, unset: "0" },
  presence_penalty: { label: "Presence penalty", least: -2, most: 2, step: 0.1, unset: "0" },
  frequency_penalty: { label: "Frequency penalty", least: -2, most: 2, step: 0.1, unset: "0" },
  repetition_penalty: { label: "Repetition penalty", least: 0.01, most: 2, step: 0.05, unset: "1" },
  top_logprobs: { label: "Alternatives", least: 0, most: 20, isInteger: true, unset: "0" },
};
const MOST_STOPS = 16;
const LOGPROBS = ["top_logprobs"];

// Returns {body, wrong} for `values`: the parameters to send, and error messages by field.
export function checked(values) {
  const body = {};
  const wrong = {};
  const take = (name, read) => {
    try {
      const value = read(values[name] ?? "");
      if (value !== undefined) body[name] = value;
    } catch (error) {
      wrong[name] = error.message;
    }
  };
  for (const [name, kind] of Object.entries(NUMBERS)) {
    if (!LOGPROBS.includes(name)) take(name, (text) => number(text, kind));
  }
  if (body.min_tokens > (body.max_tokens ?? Infinity)) {
    wrong.min_tokens = "More than the most tokens.";
  }
  take("stop", stops);
  take("response_format", () => format(values));
  take("tools", tools);
  if (body.tools && values.tool_choice) body.tool_choice = values.tool_choice;
  if (values.logprobs === "on") {
    body.logprobs = true;
    take("top_logprobs", (text) => number(text, NUMBERS.top_logprobs));
  }
  return { body, wrong };
}

function number(text, { least, most, isInteger }) {
  if (text.trim() === "") return undefined;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error("This is no number.");
  if (isInteger && !Number.isInteger(value)) throw new Error("A whole number is needed.");
  if (value < least || value > most) {
    throw new Error(most < 2 ** 31 - 1 ? `From ${least} to ${most}.` : `${least} or more.`);
  }
  return value;
}

// One stop string per line; \n is a line break.
function stops(text) {
  const found = text.split("\n").filter((line) => line !== "");
  if (found.length > MOST_STOPS) throw new Error(`At most ${MOST_STOPS}.`);
  return found.length ? found.map((line) => line.replaceAll("\\n", "\n")) : undefined;
}

function format(values) {
  if (values.form === "json_object") return { type: "json_object" };
  if (values.form !== "json_schema") return undefined;
  const schema = json(values.response_format ?? "", "A schema is needed.");
  if (!isObject(schema)) throw new Error("A schema is an object: {…}.");
  if (schema.type !== undefined && !isType(schema.type)) {
    throw new Error(`type: ${JSON.stringify(schema.type)} is no type of JSON.`);
  }
  return { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
}

const TYPES = new Set(["array", "boolean", "integer", "null", "number", "object", "string"]);
const isType = (type) => (Array.isArray(type) ? type.every((one) => TYPES.has(one)) : TYPES.has(type));
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function tools(text) {
  if (text.trim() === "") return undefined;
  const found = json(text);
  if (!Array.isArray(found)) throw new Error("A list is needed: [{…}].");
  for (const [n, tool] of found.entries()) {
    const at = `Tool ${n + 1}`;
    if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) {
      throw new Error(`${at}: {"type": "function", "function": {…}} is needed.`);
    }
    if (typeof tool.function.name !== "string" || !/^[\w.-]{1,64}$/.test(tool.function.name)) {
      throw new Error(`${at}: its function needs a name of letters, digits, _ and -.`);
    }
    if (tool.function.parameters !== undefined && !isObject(tool.function.parameters)) {
      throw new Error(`${at}: its parameters must be a schema.`);
    }
  }
  return found.length ? found : undefined;
}

function json(text, empty = "") {
  if (text.trim() === "") throw new Error(empty);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${whereIn(text, error.message)}`);
  }
}

// Converts the position in the browser's message, a number of characters, to a line and column.
function whereIn(text, message) {
  const found = /position (\d+)/.exec(message);
  if (!found) return message;
  const before = text.slice(0, Number(found[1])).split("\n");
  const said = message.replace(/ in JSON.*$| at position.*$/s, "");
  return `${said}, line ${before.length}, column ${before.at(-1).length + 1}.`;
}

// Returns the field for the parameter that an error names, such as `tools[0].function.name`.
export function fieldOf(param) {
  const name = /^\w+/.exec(param ?? "")?.[0];
  if (name === "tool_choice" || name === "parallel_tool_calls") return "tools";
  if (name === "logprobs") return "top_logprobs";
  return name in NUMBERS || ["stop", "response_format", "tools"].includes(name) ? name : null;
}
