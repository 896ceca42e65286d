// The playground: creates its parts and connects them.

import { askJson, inWords } from "../api.js";
import { $, announce, drawIcons, el } from "../dom.js";
import { useKeys } from "../key.js";
import { bodyFor, newAnswer, newConversation, openCalls, randomId, settle } from "./conversation.js";
import { showCode } from "./code.js";
import { Composer } from "./composer.js";
import { ParametersForm } from "./form.js";
import { ConversationList } from "./list.js";
import { Panes } from "./panes.js";
import { fieldOf } from "./parameters.js";
import { Run } from "./run.js";
import * as shelf from "./shelf.js";
import { Side } from "./side.js";
import { TurnView } from "./turn.js";

const NEAR_THE_END = 80;

class Playground {
  constructor() {
    this.models = [];
    this.runs = new Map(); // by answer
    this.views = [];
    this.scroll = $("#scroll");
    this.panes = new Panes({
      list: $("#panes"), add: $("#add-pane"), models: () => this.models,
      changed: () => {
        this.keep();
        this.draw();
      },
      goes: (pane) => {
        for (const { answers } of this.conversation.turns) this.runs.get(answers[pane.id])?.stop();
      },
    });
    this.form = new ParametersForm($("#fields"), (system, parameters) => {
      Object.assign(this.conversation, { system, parameters });
      this.keep();
    });
    this.composer = new Composer({ send: () => this.send(), stop: () => this.stop() });
    this.list = new ConversationList($("#conversations"), {
      open: (id) => {
        // The stored form of the open conversation may lack the answer in progress: do not load it.
        const stored = id === this.conversation.id ? null : shelf.load(id);
        if (stored) this.open(stored);
        else this.drawList(); // browsers may clear storage without an event
      },
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
    });
    this.left = new Side($("#list"), $("#show-list"));
    this.right = new Side($("#parameters"), $("#show-parameters"));
    $("#reset").addEventListener("click", () => this.reset());
    $("#new").addEventListener("click", () => this.openNew());
    $("#clear").addEventListener("click", () => this.clear());
    $("#show-code").addEventListener("click", () => this.code());
    shelf.whenChangedElsewhere((id) => this.changedElsewhere(id));
    const [newest] = shelf.list();
    this.open((newest && shelf.load(newest.id)) ?? newConversation());
  }

  findModels() {
    this.finding = this.askForModels();
    return this.finding;
  }

  // Finds the models that answer chats. Others return embeddings or rankings.
  async askForModels() {
    try {
      const { data } = await askJson("models");
      this.models = data.filter(({ modes }) => !modes?.some((mode) => mode === "embeddings" || mode === "rerank"));
      this.composer.notify(this.models.length ? "" : "There is no model here that answers chats.");
    } catch (error) {
      this.composer.notify(inWords(error));
    }
    this.panes.fill();
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.panes.show(conversation);
    this.form.set(conversation.system, conversation.parameters);
    this.draw();
    this.drawList();
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  openNew() {
    this.open(newConversation(this.conversation));
    this.left.closeIfOver();
    this.composer.focus();
  }

  drawList() {
    const stored = shelf.list();
    this.list.draw(stored, this.conversation.id);
    $("#kept").hidden = stored.length === 0;
  }

  keep(conversation = this.conversation) {
    if (!conversation.turns.length) return; // nothing to store
    const { changed } = conversation;
    const stored = shelf.load(conversation.id);
    // Another tab has stored another state meanwhile: store this one under a new id.
    if (stored && stored.changed !== changed) {
      conversation.id = randomId();
      this.composer.notify("Another tab has changed this conversation: this tab's version is stored as a separate one.");
    }
    conversation.changed = Date.now();
    if (!shelf.save(conversation)) {
      conversation.changed = changed;
      this.composer.notify("This browser cannot store more conversations: delete some, or this one is lost when you close the page.");
    }
    this.drawList();
  }

  // Another tab has changed the conversation `id`. If it is open here, shows the new state, unless an
  // answer or an edit is in progress: `keep` then stores this tab's state as a separate conversation.
  changedElsewhere(id) {
    const { conversation } = this;
    const stored = id === conversation.id ? shelf.load(id) : null;
    if (stored?.changed === conversation.changed) conversation.title = stored.title; // only renamed
    else if (stored && !this.runs.size && !$("#turns .editing")) return this.open(stored);
    this.drawList();
  }

  // An empty `title` changes nothing: the title is the given name, else the start of the first prompt.
  rename(id, title) {
    if (!title) return this.drawList();
    if (id === this.conversation.id) this.conversation.title = title;
    const stored = shelf.load(id);
    if (stored) shelf.save(Object.assign(stored, { title })); // else another tab has deleted it meanwhile
    this.drawList();
  }

  remove(id) {
    shelf.remove(id);
    if (id === this.conversation.id) this.open(newConversation(this.conversation));
    else this.drawList();
    announce("Deleted.");
  }

  clear() {
    if (!confirm("Delete all conversations from this browser?")) return;
    shelf.clear();
    this.openNew();
  }

  reset() {
    this.form.set("", {});
    Object.assign(this.conversation, { system: "", parameters: {} });
    this.keep();
  }

  // Existing turns get only new answers, because the user may be editing one of their prompts.
  draw() {
    const { turns, panes } = this.conversation;
    $("#welcome").hidden = turns.length > 0;
    const stay = this.views.filter((view, number) => view.turn === turns[number]);
    for (const view of this.views) if (!stay.includes(view)) view.node.remove();
    for (const view of stay) view.draw();
    const come = [...turns.entries()].slice(stay.length).map(([number, turn]) => new TurnView(turn, panes, {
      edited: (prompt) => this.edit(number, prompt),
      isLast: () => number === this.conversation.turns.length - 1,
      forPane: (pane) => this.doable(number, pane),
    }));
    $("#turns").append(...come.map((view) => view.node));
    this.views = [...stay, ...come];
  }

  // Returns the actions of an answer's buttons. Only the last turn can be repeated or continued.
  doable(number, pane) {
    const isLast = number === this.conversation.turns.length - 1;
    const answer = this.conversation.turns[number].answers[pane.id];
    return {
      stop: () => this.runs.get(answer)?.stop(),
      again: isLast ? () => this.again(number, pane) : null,
      sendResults: isLast ? () => this.sendResults() : null,
      written: () => this.keep(),
      drawn: () => this.follow(),
    };
  }

  // Sends the prompt once the models are known. Until then, the prompt stays in the form.
  async send() {
    const { conversation } = this;
    const { text } = this.composer;
    const lacks = () => conversation.panes.some((pane) => !pane.model);
    if (lacks()) {
      this.composer.notify("This is sent once it is known which models there are.");
      await this.finding;
      if (lacks()) await this.findModels(); // the first attempt failed, for example without a key
    }
    if (lacks() || !this.composer.canSend || conversation !== this.conversation) return;
    if (this.composer.text !== text) {
      this.composer.notify("Not sent, because you have changed the prompt: send it when it is ready.");
      return;
    }
    this.composer.notify("");
    const parameters = this.checked();
    if (!parameters) return;
    delete conversation.turns.at(-1)?.former; // the user continues from the edited turn, so drop the former turns
    conversation.turns.push({ prompt: this.composer.take(), answers: {} });
    this.answer(conversation.turns.length - 1, conversation.panes, parameters, true);
  }

  // Returns the parameters to send, or null. While one is invalid, nothing may be stopped, cut or sent.
  checked() {
    const parameters = this.form.check();
    if (!parameters) {
      this.right.open();
      this.form.focusWrong();
    }
    return parameters;
  }

  // Sends the results of tools. Panes whose models have called no tools are skipped.
  sendResults() {
    if (this.runs.size) {
      this.composer.notify("Send the results once all have answered.");
      return;
    }
    this.composer.notify("");
    const parameters = this.checked();
    if (!parameters) return;
    const last = this.conversation.turns.length - 1;
    const { answers } = this.conversation.turns[last];
    const panes = this.conversation.panes.filter((pane) => openCalls(answers[pane.id]).length);
    this.conversation.turns.push({ prompt: null, answers: {} });
    this.answer(last + 1, panes, parameters, true);
  }

  again(number, pane) {
    const parameters = this.checked();
    if (parameters) this.answer(number, [pane], parameters);
  }

  edit(number, prompt) {
    const parameters = this.checked();
    if (!parameters) return;
    this.stop();
    const former = this.conversation.turns.splice(number);
    this.conversation.turns.push({ prompt, answers: {}, former });
    this.answer(number, this.conversation.panes, parameters);
  }

  async answer(number, panes, parameters, isNew = false) {
    const turn = this.conversation.turns[number];
    const started = panes.map((pane) => {
      const answer = (turn.answers[pane.id] = newAnswer(pane.model, turn.answers[pane.id]));
      const view = () => this.views[number]?.views.get(pane.id);
      const run = new Run(answer, bodyFor(this.conversation, pane, number, parameters), () => {
        const seen = view();
        if (seen?.answer === answer) seen.changed();
      });
      this.runs.set(answer, run);
      return { answer, run };
    });
    this.draw();
    // Store the prompt now, in case the user closes the page before the answer.
    if (isNew) this.keep();
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.composer.busy(true);
    const { conversation } = this;
    await Promise.all(started.map(({ answer, run }) => this.follows(turn, answer, run, conversation)));
  }

  async follows(turn, answer, run, conversation) {
    const end = run.finished();
    await run.ended;
    this.runs.delete(answer);
    if (!this.runs.size) this.composer.busy(false);
    announce(answer.error?.message ?? `${answer.model} ${answer.stopped ? "was stopped" : "has answered"}.`);
    settle(turn, answer);
    const field = answer.error && fieldOf(answer.error.param);
    if (field) this.form.refuse(field, answer.error.message);
    // Also store an answer that was stopped because the user opened another conversation, unless it was deleted.
    if (conversation === this.conversation || shelf.load(conversation.id)) this.keep(conversation);
    await end;
    if (answer.stopped && conversation === this.conversation) this.keep();
  }

  stop() {
    for (const run of this.runs.values()) run.stop();
  }

  // Scrolls to the end while answers grow, unless the user has scrolled up.
  follow() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroll;
    const grown = scrollHeight - (this.height ?? scrollHeight);
    this.height = scrollHeight;
    if (scrollTop + clientHeight + grown > scrollHeight - NEAR_THE_END) this.scroll.scrollTop = scrollHeight;
  }

  // Shows the code for the prompt in the form, else for the last request.
  code() {
    const { turns, panes } = this.conversation;
    const parameters = this.checked();
    if (!parameters) return;
    const written = this.composer.text.trim() || (turns.length ? null : "Hello");
    const asked = written === null ? turns : [...turns, { prompt: written, answers: {} }];
    const seen = { ...this.conversation, turns: asked };
    showCode(panes.map((pane) => ({ model: pane.model, body: bodyFor(seen, pane, asked.length - 1, parameters) })));
  }
}

const STARTERS = [
  "What is the capital of France?",
  "Repeat: **Hello**, 你好, こんにちは 👋",
  "Explain in three sentences how a rainbow forms.",
];

drawIcons();
const playground = new Playground();
useKeys($("#show-key"), () => playground.findModels());
for (const text of STARTERS) {
  const use = () => {
    playground.composer.text = text;
    playground.composer.focus();
  };
  $("#starters").append(el("li", {}, el("button", { class: "button outlined", type: "button", onclick: use }, text)));
}
playground.findModels();
