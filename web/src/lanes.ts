// A lane for each learner: what it did with its time.

import type { Bin, Status } from "./api";
import { cursorLine, el, frame, swatch, type Span } from "./charts";
import { lasting } from "./format";
import { STATE_MARKS, stateFill, STATES } from "./palette";

export class Lanes {
  private rows = new Map<number, { canvas: HTMLCanvasElement; now: HTMLElement; act: HTMLElement | null }>();
  private height = 0;

  constructor(
    private readonly box: HTMLElement,
    private readonly pick: (canvas: HTMLCanvasElement, event: PointerEvent) => void,
    private readonly strike: (fault: string, learner: number) => void,
  ) {}

  legend(): Node[] {
    return STATES.map((name, state) => el("span", "", {}, swatch((c) => stateFill(c, state)), `${STATE_MARKS[state]} ${name}`));
  }

  draw(span: Span, bins: Bin[], status: Status, cursor: number): void {
    const learners = new Set<number>(status.lanes.map((lane) => lane[0]));
    for (const bin of bins) for (const lane of bin.lanes) learners.add(lane[0]);
    this.lay([...learners].sort((a, b) => a - b), status.chaos);
    const closed = bins.at(-1)?.ends ?? 0;
    for (const [learner, row] of this.rows) {
      const f = frame(row.canvas, span, { left: 2, top: 0, bottom: 0 });
      const { context } = f;
      context.fillStyle = f.ink.line;
      context.globalAlpha = 0.4;
      context.fillRect(f.left, 0, f.right - f.left, f.height);
      context.globalAlpha = 1;
      for (const bin of bins) {
        const lane = bin.lanes.find((l) => l[0] === learner);
        if (lane) {
          const [x0, x1] = [Math.max(f.left, Math.floor(f.x(bin.begins))), Math.min(f.right, Math.ceil(f.x(bin.ends)))];
          this.bin(context, lane[2], x0, x1, f.height);
        }
      }
      const present = status.lanes.find((lane) => lane[0] === learner);
      if (present && status.state === "live" && span.to > closed) {
        // Since the last round nothing is folded yet: as it stands now, from when that began.
        const from = Math.max(closed, span.from);
        context.fillStyle = stateFill(context, present[1]);
        context.fillRect(f.x(from), 0, Math.max(1.5, f.x(span.to) - f.x(from)), f.height);
      }
      cursorLine({ ...f, bottom: f.height }, cursor);
      this.say(learner, row, bins, present, cursor);
    }
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

  private say(
    learner: number, row: { canvas: HTMLCanvasElement; now: HTMLElement }, bins: Bin[], present: Status["lanes"][number] | undefined, cursor: number,
  ): void {
    // At the cursor; where it follows the run, as things stand now.
    const until = cursor < 0 ? bins : bins.filter((b) => b.begins <= cursor);
    const lanes = until.flatMap((b) => b.lanes.filter((l) => l[0] === learner));
    const last = lanes.at(-1);
    const [state, loss] = cursor < 0 && present ? [present[1], present[3]] : [last?.[1] ?? 5, last?.[10] ?? null];
    const step = lanes.findLast((l) => l[5] > 0)?.[5];
    const name = STATES[state] ?? "unknown";
    const parts = [`${STATE_MARKS[state]} ${name}`];
    if (loss !== null) parts.push(`loss ${loss.toFixed(3)}`);
    if (step) parts.push(`${lasting(step)} a step`);
    row.now.textContent = parts.join(" · ");
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
    this.box.replaceChildren();
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
