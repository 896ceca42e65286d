// Form for the prompt. If files are dropped or pasted, shows that only text can be sent.

import { $, sendOnEnter } from "../dom.js";

const TEXT_ALONE = "This server takes text: pictures and files cannot be sent.";

export class Composer {
  constructor({ send, stop }) {
    this.input = $("#prompt");
    this.notice = $("#composer-notice");
    this.isBusy = false;
    const form = $("#composer");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.canSend) send();
    });
    sendOnEnter(this.input);
    this.input.addEventListener("input", () => this.grow());
    $("#stop").addEventListener("click", stop);
    this.input.addEventListener("paste", (event) => this.refuseFiles(event, event.clipboardData));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!this.refuseFiles(event, event.dataTransfer)) this.takeText(event);
    });
  }

  get canSend() {
    return !this.isBusy && this.text.trim() !== "";
  }

  take() {
    const prompt = this.text;
    this.text = "";
    return prompt;
  }

  get text() {
    return this.input.value;
  }

  set text(text) {
    this.input.value = text;
    this.grow();
  }

  focus() {
    this.input.focus();
  }

  busy(isBusy) {
    this.isBusy = isBusy;
    $("#stop").hidden = !isBusy;
    $("#send").hidden = isBusy;
  }

  notify(text) {
    this.notice.textContent = text;
    this.notice.hidden = !text;
  }

  // Adjusts the height to the text in browsers without `field-sizing`.
  grow() {
    if (CSS.supports("field-sizing", "content")) return;
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  refuseFiles(event, data) {
    if (!data?.files.length) return false;
    event.preventDefault();
    this.notify(TEXT_ALONE);
    return true;
  }

  takeText(event) {
    if (event.target.closest?.("textarea, input")) return; // the browser inserts the text itself
    event.preventDefault();
    const text = event.dataTransfer.getData("text/plain");
    if (text) this.text += text;
  }
}
