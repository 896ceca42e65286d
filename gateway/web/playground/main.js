// The playground: puts the parts together.

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
        // The kept form of what is open may lack the answer that comes.
        const kept = id === this.conversation.id ? null : shelf.load(id);
        if (kept) this.open(kept);
        else this.drawList(); // it may have gone without a word, as browsers clear what they keep
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

  // Those that answer chats; others make vectors or rankings.
  async askForModels() {
    try {
      const { data } = await askJson("models");
      this.models = data.filter(({ modes }) => !modes?.some((mode) => mode === "embeddings" || mode === "rerank"));
      this.composer.tell(this.models.length ? "" : "There is no model here that answers chats.");
    } catch (error) {
      this.composer.tell(inWords(error));
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
    const kept = shelf.list();
    this.list.draw(kept, this.conversation.id);
    $("#kept").hidden = kept.length === 0;
  }

  keep(conversation = this.conversation) {
    if (!conversation.turns.length) return; // nobody has said anything
    const { changed } = conversation;
    const kept = shelf.load(conversation.id);
    // Another tab has kept it meanwhile: neither is kept over the other.
    if (kept && kept.changed !== changed) {
      conversation.id = randomId();
      this.composer.tell("Another tab has changed this conversation: what was here is kept beside it.");
    }
    conversation.changed = Date.now();
    if (!shelf.save(conversation)) {
      conversation.changed = changed;
      this.composer.tell("This browser keeps no more conversations: delete some, or this one is lost with the page.");
    }
    this.drawList();
  }

  // What is open goes on from there, unless something is under way here: `keep` tells them apart.
  changedElsewhere(id) {
    const { conversation } = this;
    const kept = id === conversation.id ? shelf.load(id) : null;
    if (kept?.changed === conversation.changed) conversation.title = kept.title; // it was but renamed
    else if (kept && !this.runs.size && !$("#turns .editing")) return this.open(kept);
    this.drawList();
  }

  // Without a title it stays as it is called: by what it begins with, unless somebody has named it.
  rename(id, title) {
    if (!title) return this.drawList();
    if (id === this.conversation.id) this.conversation.title = title;
    const kept = shelf.load(id);
    if (kept) shelf.save(Object.assign(kept, { title })); // else another tab has deleted it meanwhile
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

  // Turns that were there get new answers alone: one of their prompts may be being edited.
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

  // What the buttons of an answer do; only the last turn can be asked again or gone on from.
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

  // Not before there is a model to ask: until then the prompt stays where it is written.
  async send() {
    const { conversation } = this;
    const { text } = this.composer;
    const lacks = () => conversation.panes.some((pane) => !pane.model);
    if (lacks()) {
      this.composer.tell("This is sent once it is known which models there are.");
      await this.finding;
      if (lacks()) await this.findModels(); // they were refused, for want of a key
    }
    if (lacks() || !this.composer.canSend || conversation !== this.conversation) return;
    if (this.composer.text !== text) {
      this.composer.tell("Not sent, as you have gone on writing: send it when it is ready.");
      return;
    }
    this.composer.tell("");
    const parameters = this.checked();
    if (!parameters) return;
    delete conversation.turns.at(-1)?.former; // whoever goes on from an edited turn has chosen it
    conversation.turns.push({ prompt: this.composer.take(), answers: {} });
    this.answer(conversation.turns.length - 1, conversation.panes, parameters, true);
  }

  // The parameters to send, or null: nothing is stopped, cut or sent while one is wrong.
  checked() {
    const parameters = this.form.check();
    if (!parameters) {
      this.right.open();
      this.form.focusWrong();
    }
    return parameters;
  }

  // Panes whose models have called nothing have nothing to go on with.
  sendResults() {
    if (this.runs.size) {
      this.composer.tell("Send the results once all have answered.");
      return;
    }
    this.composer.tell("");
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
    const begun = panes.map((pane) => {
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
    // Whoever leaves before the answer finds the prompt again.
    if (isNew) this.keep();
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.composer.busy(true);
    const { conversation } = this;
    await Promise.all(begun.map(({ answer, run }) => this.follows(turn, answer, run, conversation)));
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
    // One that was left, and so stopped, is kept as well; one that was deleted is not.
    if (conversation === this.conversation || shelf.load(conversation.id)) this.keep(conversation);
    await end;
    if (answer.stopped && conversation === this.conversation) this.keep();
  }

  stop() {
    for (const run of this.runs.values()) run.stop();
  }

  // Stays at the end while answers grow, unless somebody has scrolled up to read.
  follow() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroll;
    const grown = scrollHeight - (this.height ?? scrollHeight);
    this.height = scrollHeight;
    if (scrollTop + clientHeight + grown > scrollHeight - NEAR_THE_END) this.scroll.scrollTop = scrollHeight;
  }

  // Of what is being written, else of what was asked last.
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
