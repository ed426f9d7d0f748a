// The page: one window of time and one cursor in it, which all panels share.

import * as api from "./api";
import { el, timeOf, type Span } from "./charts";
import { drawFates, drawLoss, drawOverview, drawRounds, lossLegend, roundsLegend } from "./curves";
import { clock, some, thousands } from "./format";
import { Lanes } from "./lanes";
import { showEvents, showFates, showLinks, showRound } from "./panels";

const by = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const canvas = (id: string): HTMLCanvasElement => by<HTMLCanvasElement>(id);

const WORDS: Record<api.Status["state"], string> = {
  starting: "… starting",
  live: "● live",
  stopped: "‖ syncer stopped",
  finished: "■ finished",
  cut: "✕ cut short",
};
const LEAST_SPAN = 0.05;

class Page {
  private status: api.Status | null = null;
  private all: api.Bin[] = [];
  private bins: api.Bin[] = [];
  private points: api.Point[] = [];
  private events: { count: number; events: api.Happened[] } = { count: 0, events: [] };
  private round: api.Round | null = null;
  private span: Span = { from: 0, to: 1 };
  private cursor = 0;
  private follow = true;
  private whole = true;
  private asking: AbortController | null = null;
  private askingRound: AbortController | null = null;
  private told = 0;
  private drawing = false;
  private again = false;
  private readonly lanes = new Lanes(by("lanes"), (c, event) => this.point(c, event, 2), (fault, learner) => void this.strike(fault, learner));

  async begin(): Promise<void> {
    by("lanes-legend").replaceChildren(...this.lanes.legend());
    this.listen();
    await this.tell(await api.status());
    void this.hear();
  }

  // ---------------------------------------------------------------- news

  private async hear(): Promise<void> {
    let pause = 500;
    for (;;) {
      try {
        await api.news((status) => {
          pause = 500;
          notice("");
          void this.tell(status);
        });
      } catch {
        // the server ended or is being restarted: what is on the page stays
      }
      if (this.status?.state === "finished") notice("The server has ended. What was loaded stays; `atoll watch` shows the run again.");
      else notice("The connection is lost; trying again …");
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(10_000, pause * 2);
    }
  }

  private async tell(status: api.Status): Promise<void> {
    const before = this.status;
    this.status = status;
    this.told = performance.now();
    this.showHead(status);
    if (!before || status.heldout !== before.heldout) this.points = await api.heldout();
    if (this.follow) {
      const long = this.span.to - this.span.from;
      this.span = this.whole ? { from: 0, to: Math.max(LEAST_SPAN, status.ends) } : { from: Math.max(0, status.ends - long), to: status.ends };
      this.cursor = status.ends;
    }
    if (!before || status.rounds !== before.rounds || status.events !== before.events || status.state !== before.state) await this.load(true);
    else this.draw();
  }

  private showHead(s: api.Status): void {
    const state = by("state");
    state.textContent = WORDS[s.state];
    state.dataset["state"] = s.state;
    by("name").textContent = s.name;
    document.title = `${s.name} · ${WORDS[s.state]}`;
    const total = s.settings?.total_steps ?? 0;
    if (s.settings) {
      const { preset, learners, fragments, quorum, model, seed } = s.settings;
      by("settings").textContent = `${preset} · ${model} · ${some(learners, "learner")} · ${some(fragments, "fragment")} · quorum ${quorum} · seed ${seed}`;
    }
    const held = this.points.at(-1);
    const inSync = s.lanes.filter((lane) => lane[1] === 0).length;
    const figures: [string, string, string][] = [
      ["outer step", `${thousands(s.last_step)} of ${thousands(total)}`, "step"],
      ["in sync", `${inSync} of ${s.settings?.learners ?? s.lanes.length}`, "sync"],
      ["training loss", s.loss === null ? "–" : s.loss.toFixed(4), "loss-now"],
      ["held-out loss", held && held.loss !== null ? held.loss.toFixed(4) : "–", "heldout-now"],
      [s.virtual ? "virtual time" : "time", clock(s.ends), "time-now"],
    ];
    by("figures").replaceChildren(...figures.map(([name, value, id]) => el("div", "", {}, el("dt", name), el("dd", value, { id: `f-${id}` }))));
    by("done").style.width = total ? `${(100 * s.last_step) / total}%` : "0";
    const bar = by("done").parentElement!;
    bar.setAttribute("aria-valuenow", String(s.last_step));
    bar.setAttribute("aria-valuemax", String(total));
  }

  // ---------------------------------------------------------------- loading

  private async load(grown = false): Promise<void> {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const most = Math.max(40, Math.min(400, Math.round((canvas("loss").clientWidth || 600) / 3)));
    const { from, to } = this.span;
    try {
      const [bins, events, all] = await Promise.all([
        api.bins(from, to, most, asking.signal),
        api.events(from, to, 200, asking.signal),
        grown ? api.bins(0, 1e9, 150, asking.signal) : Promise.resolve(this.all),
        this.loadRound(),
      ]);
      [this.bins, this.events, this.all] = [bins, events, all];
      showEvents(by("events"), by("events-count"), events, (at) => this.go(at));
      showLinks(by<HTMLTableElement>("links"), bins);
      by("loss-legend").replaceChildren(...lossLegend(this.points.length > 0));
      by("rounds-legend").replaceChildren(...roundsLegend(bins));
      this.draw();
    } catch (error) {
      if (!(error instanceof DOMException && error.name === "AbortError")) notice(String(error));
    }
  }

  private async loadRound(): Promise<void> {
    this.askingRound?.abort();
    const asking = (this.askingRound = new AbortController());
    try {
      this.show(await api.roundAt(this.cursor, asking.signal));
    } catch (error) {
      if (!(error instanceof DOMException && error.name === "AbortError")) notice(String(error));
    }
  }

  private show(round: api.Round | null): void {
    this.round = round;
    showRound(by("round-detail"), by("h-round"), round);
    showFates(by<HTMLTableElement>("fates-table"), round?.fates);
  }

  // ---------------------------------------------------------------- drawing

  private draw(): void {
    // At most one drawing a frame, whatever comes in.
    if (this.drawing) {
      this.again = true;
      return;
    }
    this.drawing = true;
    requestAnimationFrame(() => {
      this.paint();
      this.drawing = false;
      if (this.again) {
        this.again = false;
        this.draw();
      }
    });
  }

  private now(): number {
    const s = this.status;
    if (!s) return 1;
    return s.state === "live" && s.epoch ? s.ends + (performance.now() - this.told) / 1000 : s.ends;
  }

  private paint(): void {
    const s = this.status;
    if (!s) return;
    const ends = Math.max(LEAST_SPAN, this.now());
    const all = { from: 0, to: ends };
    if (this.follow && this.whole) this.span = { ...this.span, to: ends };
    const mark = this.follow ? -1 : this.cursor;
    drawOverview(canvas("overview"), all, this.all, this.span, mark);
    drawLoss(canvas("loss"), this.span, this.bins, this.points, mark);
    drawRounds(canvas("rounds"), this.span, this.bins, s.settings?.learners ?? 0, mark);
    drawFates(canvas("fates"), this.span, this.bins, mark);
    this.lanes.draw(this.span, this.bins, s, mark);
    const slider = by<HTMLInputElement>("slider");
    slider.max = String(ends);
    if (document.activeElement !== slider || this.follow) slider.value = String(this.follow ? ends : this.cursor);
    slider.setAttribute("aria-valuetext", `${clock(this.cursor)}, round ${this.round?.outer_step ?? 0}`);
    by("from").textContent = clock(this.span.from);
    by("to").textContent = clock(this.span.to);
    by("cursor").textContent = this.follow && s.state === "live" ? "following" : `at ${clock(this.cursor)}${this.round ? `, round ${thousands(this.round.outer_step)}` : ""}`;
    by("last").setAttribute("aria-pressed", String(this.follow));
    by("whole").setAttribute("aria-pressed", String(this.whole));
    document.body.dataset["rounds"] = String(this.bins.length ? s.rounds : 0);
  }

  // ---------------------------------------------------------------- moving

  private go(at: number): void {
    this.follow = false;
    this.cursor = Math.min(Math.max(0, at), this.now());
    if (this.cursor < this.span.from || this.cursor > this.span.to) {
      const long = this.span.to - this.span.from;
      const from = Math.max(0, this.cursor - long / 2);
      this.look({ from, to: from + long });
    } else {
      void this.loadRound().then(() => this.draw());
      this.draw();
    }
  }

  private look(span: Span): void {
    this.span = span;
    this.whole = span.from <= 0 && span.to >= this.now() - 1e-6;
    this.draw();
    void this.load();
  }

  private zoom(factor: number): void {
    const middle = this.follow ? this.span.to : this.cursor;
    const long = Math.max(LEAST_SPAN, (this.span.to - this.span.from) * factor);
    if (long >= this.now()) return this.seeWhole();
    const share = (middle - this.span.from) / Math.max(1e-9, this.span.to - this.span.from);
    const from = Math.min(Math.max(0, middle - share * long), this.now() - long);
    this.look({ from, to: from + long });
    this.whole = false;
  }

  private seeWhole(): void {
    this.look({ from: 0, to: this.now() });
    this.whole = true;
  }

  private shift(share: number): void {
    const long = this.span.to - this.span.from;
    const from = Math.min(Math.max(0, this.span.from + share * long), Math.max(0, this.now() - long));
    this.follow = false;
    this.look({ from, to: from + long });
  }

  private async toRound(step: number): Promise<void> {
    const s = this.status;
    if (!s || !s.rounds) return;
    const found = await api.round(Math.min(Math.max(step, s.first_step), s.last_step));
    if (!found) return;
    this.follow = false;
    this.show(found);
    this.cursor = found.closed;
    if (this.cursor < this.span.from || this.cursor > this.span.to) {
      const long = this.span.to - this.span.from;
      const from = Math.max(0, this.cursor - long / 2);
      this.look({ from, to: from + long });
    } else this.draw();
  }

  private newest(): void {
    this.follow = true;
    if (this.status) void this.tell({ ...this.status, ends: this.now(), events: -1 });
  }

  private nextEvent(direction: 1 | -1): void {
    const times = this.events.events.map((e) => e.at);
    const at = direction > 0 ? times.find((t) => t > this.cursor + 1e-6) : times.reverse().find((t) => t < this.cursor - 1e-6);
    if (at !== undefined) this.go(at);
  }

  private async strike(fault: string, learner: number): Promise<void> {
    try {
      notice(await api.strike(fault, learner));
      setTimeout(() => notice(""), 4000);
    } catch (error) {
      notice(String(error));
    }
  }

  // ---------------------------------------------------------------- hands

  private point(target: HTMLCanvasElement, event: PointerEvent, left?: number): void {
    const move = (e: PointerEvent): void => this.go(timeOf(target, this.span, e.clientX, left));
    move(event);
    target.setPointerCapture(event.pointerId);
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", () => target.removeEventListener("pointermove", move), { once: true });
  }

  private listen(): void {
    const click = (id: string, act: () => void): void => by(id).addEventListener("click", act);
    click("first", () => void this.toRound(this.status?.first_step ?? 1));
    click("previous", () => void this.toRound((this.round?.outer_step ?? 1) - 1));
    click("next", () => void this.toRound((this.round?.outer_step ?? 0) + 1));
    click("last", () => this.newest());
    click("in", () => this.zoom(0.5));
    click("out", () => this.zoom(2));
    click("whole", () => this.seeWhole());
    click("help", () => by<HTMLDialogElement>("keys").showModal());
    by<HTMLInputElement>("slider").addEventListener("input", (e) => this.go(Number((e.target as HTMLInputElement).value)));
    by<HTMLInputElement>("goto").addEventListener("change", (e) => {
      const typed = (e.target as HTMLInputElement).value.replaceAll(/[ ,]/g, "");
      if (/^\d+$/.test(typed)) void this.toRound(Number(typed));
    });
    for (const id of ["loss", "rounds", "fates"]) canvas(id).addEventListener("pointerdown", (e) => this.point(canvas(id), e));
    canvas("overview").addEventListener("pointerdown", (e) => {
      const at = timeOf(canvas("overview"), { from: 0, to: this.now() }, e.clientX, 4);
      this.go(at);
    });
    window.addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.addEventListener("keydown", (e) => this.key(e));
    setInterval(() => {
      if (this.status?.state === "live" && this.follow) this.draw();
    }, 1000);
  }

  private key(e: KeyboardEvent): void {
    const target = e.target as HTMLElement;
    if (e.ctrlKey || e.metaKey || e.altKey || (target.tagName === "INPUT" && target.id === "goto") || by<HTMLDialogElement>("keys").open) return;
    const acts: Record<string, () => void> = {
      ArrowLeft: () => void this.toRound((this.round?.outer_step ?? 1) - 1),
      ArrowRight: () => void this.toRound((this.round?.outer_step ?? 0) + 1),
      Home: () => void this.toRound(this.status?.first_step ?? 1),
      End: () => this.newest(),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      "0": () => this.seeWhole(),
      "[": () => this.shift(-0.5),
      "]": () => this.shift(0.5),
      e: () => this.nextEvent(1),
      E: () => this.nextEvent(-1),
      g: () => by("goto").focus(),
      "?": () => by<HTMLDialogElement>("keys").showModal(),
    };
    const act = acts[e.key];
    if (act) {
      e.preventDefault();
      act();
    }
  }
}

function notice(text: string): void {
  by("notice").textContent = text;
}

void new Page().begin().catch((error: unknown) => notice(String(error)));
