// Dialog that uploads an adapter, or a version of one, from a local folder, and shows the progress.

import { el } from "../dom.js";
import { upload } from "./calls.js";
import { field } from "./controls.js";
import { ask } from "./dialogs.js";
import { store } from "./store.js";
import { setHidden, setText } from "./update.js";
import { bytes } from "./words.js";

const NEEDED = [
  ["adapter_config.json", "adapter_model.safetensors"],
  ["model.lora_config.npy", "model.lora_weights.npy"],
];
const TEMPLATE = ["tokenizer_config.json", "chat_template.jinja"];
const TAKEN = new Set([...NEEDED.flat(), ...TEMPLATE]);

export function askUpload(name) {
  const typed = { class: "input", required: "", autocomplete: "off", spellcheck: "false" };
  const named = el("input", { ...typed, name: "name", value: name });
  const base = el("input", { ...typed, name: "base", value: store.state?.gateway?.model ?? "" });
  const folder = el("input", { class: "input", type: "file", name: "file", webkitdirectory: "", multiple: "", required: "" });
  const list = el("ul", { class: "files" });
  const what = el("p", { class: "hint", "aria-live": "polite" });
  const progress = el("progress", { max: "1", value: 0, hidden: true, "aria-label": "Sent" });
  const sent = el("p", { class: "hint", hidden: true });
  const request = new XMLHttpRequest(); // fetch has no upload progress
  let chosen = [];

  const update = () => setText(what, consequence(named.value.trim(), chosen));
  named.addEventListener("input", update);
  folder.addEventListener("change", () => {
    chosen = wantedOf(folder.files);
    list.replaceChildren(...chosen.map(lineOf));
    update();
  });
  update();

  const dialog = ask({
    title: name ? `Add a version of ${name}` : "Add an adapter",
    effects: [],
    fields: [
      field("Name", named, "Clients send it as their model. OWNER/NAME is seen by the tenant OWNER alone."),
      field("Base model", base),
      field("Folder", folder, `As PEFT saves it: ${NEEDED[0].join(" and ")}.`),
      list,
      what,
      progress,
      sent,
    ],
    confirm: "Add",
    does: () => {
      setHidden(progress, false);
      setHidden(sent, false);
      const files = chosen.filter((file) => !isLeftOut(list, file.name));
      return upload("adapters", formOf(named.value, base.value, files), request, (part, all) => {
        progress.value = all ? part / all : 0;
        setText(sent, part < all ? `Sent ${bytes(part)} of ${bytes(all)}.` : "Sent. The gateway converts and checks it.");
      });
    },
    done: (answer) => [`${answer.name} is now served as ${answer.served}.`, ...(answer.warnings ?? [])].join(" "),
  });
  dialog.addEventListener("close", () => request.abort());
}

// Only files in the folder of the weights: a training folder has many others, for example checkpoints.
function wantedOf(files) {
  const depth = (file) => (file.webkitRelativePath || file.name).split("/").length;
  const top = Math.min(...[...files].map(depth));
  return [...files].filter((file) => TAKEN.has(file.name) && depth(file) === top);
}

function lineOf(file) {
  const disabled = !TEMPLATE.includes(file.name);
  const box = el("input", { type: "checkbox", checked: true, disabled, value: file.name });
  const size = el("span", { class: "hint" }, bytes(file.size));
  return el("li", {}, el("label", { class: "check" }, box, el("code", {}, file.name), size));
}

const isLeftOut = (list, name) => [...list.querySelectorAll("input")].some((box) => box.value === name && !box.checked);

function consequence(name, chosen) {
  const there = new Set(chosen.map((file) => file.name));
  if (chosen.length && !NEEDED.some((names) => names.every((one) => there.has(one)))) {
    return `This folder is no adapter: it needs ${NEEDED[0].join(" and ")}.`;
  }
  if (!name) return "";
  const known = store.state?.adapters?.[name];
  const next = known
    ? `The next request for ${name} gets it in place of ${known.served}; running requests finish with the old version, and you may roll back.`
    : `${name} is a new adapter: tenants that may use this name can request it at once.`;
  if (!TEMPLATE.some((one) => there.has(one))) return next;
  return `${next} A chat template that is not the base model's is refused, unless this gateway trusts templates of adapters: if it does not, deselect the template.`;
}

function formOf(name, base, files) {
  const form = new FormData();
  form.append("name", name.trim());
  form.append("base", base.trim());
  for (const file of files) form.append("file", file, file.name);
  return form;
}
