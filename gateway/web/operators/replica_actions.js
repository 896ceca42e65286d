// Actions of an admin on a replica. Each asks for confirmation.

import { el } from "../dom.js";
import { call } from "./calls.js";
import { field } from "./controls.js";
import { ask } from "./dialogs.js";
import { store } from "./store.js";
import { setText } from "./update.js";
import { count, replicasOf } from "./words.js";

const HOLDS = "This applies to all gateways, also after restarts, until you give the replica back to the file. The file is not changed.";

const path = (endpoint) => `admin/replicas/${encodeURIComponent(endpoint)}`;
const numbered = (endpoint) => `replica ${replicasOf(store.state).indexOf(endpoint) + 1}, ${endpoint}`;
const others = (endpoint) => Object.entries(store.state.replicas).filter(([name, it]) => name !== endpoint && !it.drain);

export function askDrain(endpoint, replica) {
  if (replica.drain) {
    ask({
      title: `Use ${numbered(endpoint)} again?`,
      effects: [`New requests go there again, by its weight of ${replica.weight}.`, HOLDS],
      confirm: "Use again",
      does: () => call("POST", path(endpoint), { drain: false }),
      done: `${endpoint} is used again.`,
    });
    return;
  }
  ask({
    title: `Drain ${numbered(endpoint)}?`,
    effects: [...consequences(endpoint, replica), HOLDS],
    confirm: "Drain",
    danger: true,
    does: () => call("POST", path(endpoint), { drain: true }),
    done: `${endpoint} is being drained.`,
  });
}

function consequences(endpoint, replica) {
  const left = others(endpoint).filter(([, it]) => it.state === "ready");
  if (left.length === 0) {
    return ["No other replica is ready: new requests are refused until one is. What is under way ends there."];
  }
  const slots = left.reduce((sum, [, it]) => sum + (it.places ?? 0), 0);
  const stay = `${count(left.length, "other replica")}${slots ? ` with ${count(slots, "slot")}` : ""}`;
  const running = count(replica.in_flight ?? 0, "request");
  return [
    replica.in_flight
      ? `${running} under way may end there for some seconds; then other replicas go on with them. Clients see one answer.`
      : "Nothing is under way there.",
    `Nothing new goes there: ${stay} ${left.length === 1 ? "takes" : "take"} all of it.`,
  ];
}

export function askWeight(endpoint, replica) {
  const input = el("input", {
    class: "input", type: "number", name: "weight", min: "0", max: "1000000", step: "any", required: "", value: replica.weight,
  });
  const share = el("p", { class: "hint", "aria-live": "polite" });
  const rest = others(endpoint).reduce((sum, [, it]) => sum + (it.weight ?? 0), 0);
  const update = () => setText(share, shareOf(input.valueAsNumber, rest));
  input.addEventListener("input", update);
  update();
  ask({
    title: `Weight of ${numbered(endpoint)}`,
    effects: ["Its share of the requests, relative to the weights of the other replicas.", HOLDS],
    fields: [field("Weight", input), share],
    confirm: "Set the weight",
    does: () => call("POST", path(endpoint), { weight: input.valueAsNumber }),
    done: `The weight of ${endpoint} is set.`,
  });
}

function shareOf(weight, rest) {
  if (!(weight >= 0)) return "A number, 0 or more.";
  if (weight === 0) return "0: it gets what no other can take, and nothing else.";
  return `About ${Math.round((100 * weight) / (weight + rest))} % of the requests.`;
}

export function askRelease(endpoint) {
  ask({
    title: `Give ${numbered(endpoint)} back to the file?`,
    effects: ["Its weight, and whether it is drained, follow the configuration file again."],
    confirm: "Give back",
    does: () => call("DELETE", path(endpoint)),
    done: `${endpoint} is as the file says.`,
  });
}
