// Adds an adapter, or a version of one, from a folder of this machine, and shows how far it is.

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
  const request = new XMLHttpRequest(); // fetch does not tell how much has been sent
  let chosen = [];

  const tell = () => setText(what, consequence(named.value.trim(), chosen));
  named.addEventListener("input", tell);
  folder.addEventListener("change", () => {
    chosen = wantedOf(folder.files);
    list.replaceChildren(...chosen.map(lineOf));
    tell();
  });
  tell();

  const dialog = ask({
    title: name ? `Add a version of ${name}` : "Add an adapter",
    tells: [],
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

// Those beside the weights alone: the folder of a training has many others.
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
    ? `It is what the next request for ${name} gets, in place of ${known.served}; what runs ends on the old one, and you may roll back.`
    : `${name} is a new adapter: whoever may use models of that name can, from the next request on.`;
  if (!TEMPLATE.some((one) => there.has(one))) return next;
  return `${next} A chat template that is not the base model's is refused, unless this gateway trusts those of adapters: take the tick away from it then.`;
}

function formOf(name, base, files) {
  const form = new FormData();
  form.append("name", name.trim());
  form.append("base", base.trim());
  for (const file of files) form.append("file", file, file.name);
  return form;
}
