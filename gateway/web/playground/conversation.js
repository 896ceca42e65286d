// A conversation: prompts, and to each of them an answer from every pane.
//
// {id, title, changed, system, parameters, panes: [{id, model}], turns: [{prompt, answers}]}
// `prompt` is null in a turn that only brings the results of tools. `answers` are by pane:
// {model, text, thoughts, calls: [{id, name, arguments, result}], finish, usage, ...}
// `former` are the turns as they were, while others are being answered in their place.

export const MOST_PANES = 4;

export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(like) {
  return {
    id: randomId(),
    title: "",
    changed: Date.now(),
    system: like?.system ?? "",
    parameters: { ...like?.parameters },
    panes: like ? like.panes.map((pane) => ({ ...pane })) : [{ id: randomId(), model: "" }],
    turns: [],
  };
}

export function newAnswer(model) {
  return { model, text: "", thoughts: "", calls: [], running: true };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const words = conversation.turns[0]?.prompt?.trim().split("\n", 1)[0] ?? "";
  return words.length > 60 ? `${words.slice(0, 60)}…` : words || "New conversation";
}

// Whether an answer can be part of what is asked next: it has said something.
export const isUsable = (answer) => Boolean(answer && (answer.text || answer.calls.length));

export const openCalls = (answer) => (isUsable(answer) ? answer.calls : []);

// The messages that a pane's model is asked to answer in the turn `upTo`.
export function messagesFor(conversation, pane, upTo) {
  const messages = [];
  const system = conversation.system.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const [number, turn] of conversation.turns.slice(0, upTo + 1).entries()) {
    const answer = turn.answers[pane.id];
    const isLast = number === upTo;
    if (!isLast && !isUsable(answer)) continue;
    if (turn.prompt !== null) messages.push({ role: "user", content: turn.prompt });
    if (!isLast) messages.push(...said(answer));
  }
  return messages;
}

function said(answer) {
  if (!answer.calls.length) return [{ role: "assistant", content: answer.text }];
  const calls = answer.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  const results = answer.calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: call.result ?? "",
  }));
  return [{ role: "assistant", content: answer.text || null, tool_calls: calls }, ...results];
}

// The body of the request for that answer.
export function bodyFor(conversation, pane, turn, parameters) {
  return { model: pane.model, messages: messagesFor(conversation, pane, turn), ...parameters };
}

// What is kept: log probabilities would fill the browser's store in a day.
export function keptForm({ former, ...conversation }) {
  const turns = (former ?? conversation.turns).map((turn) => ({
    ...turn,
    answers: Object.fromEntries(
      Object.entries(turn.answers).map(([pane, { logprobs, running, ...answer }]) => [pane, answer]),
    ),
  }));
  return { ...conversation, turns };
}
