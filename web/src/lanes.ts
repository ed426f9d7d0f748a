// A lane for each learner: what it did with its time.

import type { Bin, Lane, Status } from "./api";
import { el, frame, RIGHT, swatch, type Span } from "./charts";
import { lasting } from "./format";
import { STATE_MARKS, stateFill, STATES } from "./palette";

type Row = { canvas: HTMLCanvasElement; now: HTMLElement; act: HTMLElement | null };
type Placed = { bin: Bin; lane: Lane };

export class Lanes {
  private rows = new Map<number, Row>();
  private height = 0;
  private placed = new Map<number, Placed[]>();
  private drawn: unknown[] = [];
  private readonly line = el("div", "", { class: "cursorline", "aria-hidden": "true" });

  constructor(
    private readonly box: HTMLElement,
    private readonly pick: (canvas: HTMLCanvasElement, event: PointerEvent) => void,
    private readonly strike: (fault: string, learner: number) => void,
  ) {}

  legend(): Node[] {
    return STATES.map((name, state) => el("span", "", {}, swatch((c) => stateFill(c, state)), `${STATE_MARKS[state]} ${name}`));
  }

  draw(span: Span, bins: Bin[], status: Status, cursor: number): void {
    if (this.drawn[0] !== bins) this.placed = byLearner(bins);
    const learners = new Set<number>([...status.lanes.map((lane) => lane[0]), ...this.placed.keys()]);
    this.lay([...learners].sort((a, b) => a - b), status.chaos);
    // Lanes of many learners are thousands of rectangles: they are drawn anew only if what they show has changed. The cursor is a line above.
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const shown = [bins, span.from, span.to, status, this.box.clientWidth, dark];
    if (shown.some((value, i) => value !== this.drawn[i])) {
      this.drawn = shown;
      for (const [learner, row] of this.rows) this.lane(learner, row, span, status, bins.at(-1)?.ends ?? 0);
    }
    this.mark(span, cursor);
    for (const [learner, row] of this.rows) this.say(learner, row, status.lanes.find((lane) => lane[0] === learner), cursor);
  }

  private lane(learner: number, row: Row, span: Span, status: Status, closed: number): void {
    const f = frame(row.canvas, span, { left: 2, top: 0, bottom: 0 });
    const { context } = f;
    context.fillStyle = f.ink.line;
    context.globalAlpha = 0.4;
    context.fillRect(f.left, 0, f.right - f.left, f.height);
    context.globalAlpha = 1;
    for (const { bin, lane } of this.placed.get(learner) ?? []) {
      const [x0, x1] = [Math.max(f.left, Math.floor(f.x(bin.begins))), Math.min(f.right, Math.ceil(f.x(bin.ends)))];
      this.bin(context, lane[2], x0, x1, f.height);
    }
    const present = status.lanes.find((lane) => lane[0] === learner);
    if (present && status.state === "live" && span.to > closed) {
      // Since the last round nothing is folded yet: as it stands now.
      const from = Math.max(closed, span.from);
      context.fillStyle = stateFill(context, present[1]);
      context.fillRect(f.x(from), 0, Math.max(1.5, f.x(span.to) - f.x(from)), f.height);
    }
  }

  private mark(span: Span, cursor: number): void {
    const canvas = this.rows.values().next().value?.canvas;
    const share = (cursor - span.from) / Math.max(1e-9, span.to - span.from);
    this.line.hidden = !canvas || cursor < 0 || share < 0 || share > 1;
    if (!canvas || this.line.hidden) return;
    this.line.style.left = `${canvas.offsetLeft + 2 + share * (canvas.clientWidth - 2 - RIGHT)}px`;
    this.line.style.height = `${this.box.scrollHeight}px`;
  }

  private bin(context: CanvasRenderingContext2D, permille: number[], x0: number, x1: number, height: number): void {
    let y = height;
    for (let state = 0; state < STATES.length; state += 1) {
      const part = ((permille[state] ?? 0) / 1000) * height;
      if (part <= 0) continue;
      context.fillStyle = stateFill(context, state);
      context.fillRect(x0, y - part, Math.max(1, x1 - x0), part);
      y -= part;
    }
  }

  private say(learner: number, row: Row, present: Status["lanes"][number] | undefined, cursor: number): void {
    // At the cursor; where it follows the run, as things stand now.
    const all = this.placed.get(learner) ?? [];
    let end = all.length - 1;
    if (cursor >= 0) while (end > 0 && all[end]!.bin.begins > cursor) end -= 1;
    const last = all[end]?.lane;
    const [state, loss] = cursor < 0 && present ? [present[1], present[3]] : [last?.[1] ?? 5, last?.[10] ?? null];
    while (end > 0 && !all[end]!.lane[5]) end -= 1;
    const step = all[end]?.lane[5];
    const name = STATES[state] ?? "unknown";
    const parts = [`${STATE_MARKS[state]} ${name}`];
    if (loss !== null) parts.push(`loss ${loss.toFixed(3)}`);
    if (step) parts.push(`${lasting(step)} a step`);
    const words = parts.join(" · ");
    if (row.now.textContent === words) return;
    row.now.textContent = words;
    row.now.dataset["state"] = name;
    row.canvas.setAttribute("aria-label", `learner ${learner}: ${parts.join(", ")}`);
  }

  private lay(learners: number[], chaos: string[]): void {
    const height = learners.length > 24 ? 12 : learners.length > 8 ? 18 : 26;
    const same = height === this.height && learners.length === this.rows.size && learners.every((m) => this.rows.has(m));
    const buttons = chaos.length > 0;
    if (same && [...this.rows.values()].every((row) => (row.act !== null) === buttons)) return;
    this.rows.clear();
    this.height = height;
    this.drawn = [];
    this.box.replaceChildren(this.line);
    this.box.classList.toggle("dense", height === 12);
    for (const learner of learners) {
      const canvas = el("canvas", "", { height: String(height), role: "img", "data-learner": String(learner) });
      canvas.addEventListener("pointerdown", (event) => this.pick(canvas, event));
      const now = el("span", "", { class: "now", "data-learner": String(learner) });
      const act = buttons ? this.buttons(learner, chaos) : null;
      // The buttons before the words, whose length changes: a button must not move away under the pointer.
      const right = el("span", "", { class: "side" }, ...(act ? [act, " "] : []), now);
      this.box.append(el("span", `learner ${learner}`, { class: "who" }), canvas, right);
      this.rows.set(learner, { canvas, now, act });
    }
  }

  private buttons(learner: number, chaos: string[]): HTMLElement {
    const act = el("span", "", { class: "act" });
    for (const fault of chaos) {
      const button = el("button", fault, { "data-fault": fault, "data-learner": String(learner), title: `${fault} learner ${learner}` });
      button.addEventListener("click", () => this.strike(fault, learner));
      act.append(button);
    }
    return act;
  }
}

function byLearner(bins: Bin[]): Map<number, Placed[]> {
  const found = new Map<number, Placed[]>();
  for (const bin of bins)
    for (const lane of bin.lanes) {
      const list = found.get(lane[0]);
      if (list) list.push({ bin, lane });
      else found.set(lane[0], [{ bin, lane }]);
    }
  return found;
}
