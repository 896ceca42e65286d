// A conversation: prompts, each with one answer per pane.
//
// {id, title, changed, system, parameters, panes: [{id, model}], turns: [{prompt, answers}]}
// `prompt` is null in a turn that only sends the results of tools. `answers` maps pane ids to answers:
// {model, text, thoughts, calls: [{id, name, arguments, result}], finish, usage, ...}
// `former` of an answer is the answer that it will replace; `former` of an edited turn, the turns that it
// will replace. Until the new answer has arrived, `former` is stored instead.

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

// Returns true if an answer has content, so that it can be part of the next request.
export const isUsable = (answer) => Boolean(answer && (answer.text || answer.calls.length));

const hasCome = (answer) => isUsable(answer) || Boolean(answer?.finish);

export const openCalls = (answer) => (isUsable(answer) ? answer.calls : []);

// Returns the messages of a pane's request in the turn `upTo`.
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

// Returns the body of the request for an answer.
export function bodyFor(conversation, pane, turn, parameters) {
  return { model: pane.model, messages: messagesFor(conversation, pane, turn), ...parameters };
}

// Called when an answer has ended. If it has no content, restores the former answer, with the error.
export function settle(turn, answer) {
  const { former, requestId, error, stopped } = answer;
  delete answer.former;
  if (hasCome(answer)) delete turn.former;
  else if (former) Object.assign(answer, former, { requestId, error, stopped, isFormer: true });
}

// Returns the form to store. It has no log probabilities, which would fill the browser's storage in a day.
export const storedForm = (conversation) => ({ ...conversation, turns: conversation.turns.flatMap(storedTurn) });

function storedTurn({ former, ...turn }) {
  if (former) return former.flatMap(storedTurn);
  const answers = Object.entries(turn.answers).map(([pane, answer]) => [pane, storedAnswer(answer)]);
  return { ...turn, answers: Object.fromEntries(answers) };
}

function storedAnswer({ former, logprobs, running, ...answer }) {
  return former ? storedAnswer(former) : answer;
}
