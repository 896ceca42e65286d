// A conversation: prompts, and to each of them an answer from every pane.
//
// {id, title, changed, system, parameters, panes: [{id, model}], turns: [{prompt, answers}]}
// `prompt` is null in a turn that only brings the results of tools. `answers` are by pane:
// {model, text, thoughts, calls: [{id, name, arguments, result}], finish, usage, ...}
// `former` of an answer is the one it is to replace; of an edited turn, the turns it is to replace.
// Both are there, and kept instead, until there is an answer in their place.

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

export function newAnswer(model, before) {
  const former = hasCome(before) ? before : undefined;
  return { model, text: "", thoughts: "", calls: [], running: true, former };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const words = conversation.turns[0]?.prompt?.trim().split("\n", 1)[0] ?? "";
  return words.length > 60 ? `${words.slice(0, 60)}…` : words || "New conversation";
}

// Whether an answer can be part of what is asked next: it has said something.
export const isUsable = (answer) => Boolean(answer && (answer.text || answer.calls.length));

const hasCome = (answer) => isUsable(answer) || Boolean(answer?.finish);

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

// An answer has ended. One that has not come leaves what it was to replace, and tells why.
export function settle(turn, answer) {
  const { former, requestId, error, stopped } = answer;
  delete answer.former;
  if (hasCome(answer)) delete turn.former;
  else if (former) Object.assign(answer, former, { requestId, error, stopped, isFormer: true });
}

// What is kept: log probabilities would fill the browser's store in a day.
export const keptForm = (conversation) => ({ ...conversation, turns: conversation.turns.flatMap(keptTurn) });

function keptTurn({ former, ...turn }) {
  if (former) return former.flatMap(keptTurn);
  const answers = Object.entries(turn.answers).map(([pane, answer]) => [pane, keptAnswer(answer)]);
  return { ...turn, answers: Object.fromEntries(answers) };
}

function keptAnswer({ former, logprobs, running, ...answer }) {
  return former ? keptAnswer(former) : answer;
}
