// Charts over time: loss, rounds, fates, and the overview of the whole run.

import type { Bin, Point } from "./api";
import { cursorLine, el, frame, nothing, swatch, timeAxis, valueAxis, type Span } from "./charts";
import { lasting, percent } from "./format";
import { FATE_COLOURS, HELDOUT, ink, OTHER, stateFill, STATES, WHY_COLOURS } from "./palette";

export function drawLoss(canvas: HTMLCanvasElement, span: Span, bins: Bin[], points: Point[], cursor: number): void {
  const f = frame(canvas, span);
  const known = bins.filter((b) => b.loss);
  const held = placed(points, bins).filter((p) => p.time >= span.from && p.time <= span.to);
  const values = [...known.flatMap((b) => [b.loss![0], b.loss![2]]), ...held.map((p) => p.loss)];
  if (!values.length) {
    timeAxis(f, span);
    nothing(f, "no losses yet");
    return;
  }
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const spare = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [low - spare, high + spare];
  timeAxis(f, span);
  const y = valueAxis(f, low, high, (v) => v.toFixed(high - low < 0.5 ? 3 : high - low < 5 ? 2 : 1));
  const { context } = f;
  context.save();
  context.beginPath();
  context.rect(f.left, 0, f.right - f.left, f.bottom);
  context.clip();
  const middle = (b: Bin): number => f.x((b.begins + b.ends) / 2);
  context.fillStyle = `${f.ink.loss}40`;
  context.beginPath();
  known.forEach((b, i) => (i ? context.lineTo(middle(b), y(b.loss![2])) : context.moveTo(middle(b), y(b.loss![2]))));
  [...known].reverse().forEach((b) => context.lineTo(middle(b), y(b.loss![0])));
  context.fill();
  context.strokeStyle = f.ink.loss;
  context.lineWidth = 2;
  context.beginPath();
  known.forEach((b, i) => (i ? context.lineTo(middle(b), y(b.loss![1])) : context.moveTo(middle(b), y(b.loss![1]))));
  context.stroke();
  context.fillStyle = HELDOUT;
  for (const p of held) {
    context.beginPath();
    context.moveTo(f.x(p.time), y(p.loss) - 5);
    context.lineTo(f.x(p.time) + 5, y(p.loss) + 4);
    context.lineTo(f.x(p.time) - 5, y(p.loss) + 4);
    context.fill();
  }
  context.restore();
  cursorLine(f, cursor);
  const last = known.at(-1)?.loss;
  canvas.setAttribute("aria-label", last ? `Training loss over time, ${last[1].toFixed(4)} at the end of this window` : "Loss over time");
}

function placed(points: Point[], bins: Bin[]): { time: number; loss: number }[] {
  // A held-out loss is of an outer step; the bins say when that was.
  const found: { time: number; loss: number }[] = [];
  for (const p of points) {
    const bin = bins.find((b) => b.first <= p.outer_step && p.outer_step <= b.last);
    if (p.loss === null || !bin) continue;
    const share = (p.outer_step - bin.first + 1) / (bin.last - bin.first + 1);
    found.push({ time: bin.begins + share * (bin.ends - bin.begins), loss: p.loss });
  }
  return found;
}

export function lossLegend(heldout: boolean): Node[] {
  const training = el("span", "", {}, swatch(() => ink().loss), "training loss, mean of the learners; shaded: least to most of a bin's rounds");
  return heldout ? [training, el("span", "", {}, swatch(() => HELDOUT), "▲ held-out loss of Theta")] : [training];
}

export function drawRounds(canvas: HTMLCanvasElement, span: Span, bins: Bin[], learners: number, cursor: number): void {
  const f = frame(canvas, span);
  timeAxis(f, span);
  const most = Math.max(learners, ...bins.map((b) => b.merged[2]), 1);
  const y = valueAxis(f, 0, most * 1.05, String, true);
  if (!bins.length) return nothing(f, "no round is closed yet");
  const { context } = f;
  context.save();
  context.beginPath();
  context.rect(f.left, 0, f.right - f.left, f.bottom);
  context.clip();
  for (const b of bins) {
    const [x0, x1] = [f.x(b.begins), Math.max(f.x(b.ends), f.x(b.begins) + 1)];
    const gap = x1 - x0 > 4 ? 1 : 0;
    let base = 0;
    for (const [why, n] of Object.entries(b.whys)) {
      const high = (b.merged[1] * n) / b.rounds;
      context.fillStyle = WHY_COLOURS[why] ?? OTHER;
      context.fillRect(x0, y(base + high), x1 - x0 - gap, y(base) - y(base + high));
      base += high;
    }
    if (b.merged[0] < b.merged[2]) {
      context.fillStyle = f.ink.ink;
      const middle = (x0 + x1) / 2;
      context.fillRect(middle - 0.5, y(b.merged[2]), 1, y(b.merged[0]) - y(b.merged[2]));
    }
    if (b.attempts) {
      context.fillStyle = "#d55e00";
      context.fillText("✕", (x0 + x1) / 2 - 4, f.top + 8);
    }
  }
  context.restore();
  cursorLine(f, cursor);
  const whys = total(bins, (b) => b.whys);
  const words = Object.entries(whys).map(([why, n]) => `${n} ${WHY_WORDS[why] ?? why}`);
  canvas.setAttribute("aria-label", `Learners merged in each round: ${words.join(", ")}`);
}

const WHY_WORDS: Record<string, string> = {
  all_reported: "closed because all in sync had reported",
  window_closed: "closed when the window did",
  rolled_back: "made by a rollback",
};

export function roundsLegend(bins: Bin[]): Node[] {
  const whys = total(bins, (b) => b.whys);
  const rounds = bins.reduce((n, b) => n + b.rounds, 0);
  const parts: Node[] = Object.entries(whys).map(([why, n]) =>
    el("span", "", {}, swatch(() => WHY_COLOURS[why] ?? OTHER), `${WHY_WORDS[why] ?? why} (${percent(n, rounds)})`),
  );
  const attempts = bins.reduce((n, b) => n + b.attempts, 0);
  if (attempts) parts.push(el("span", `✕ gathered again (${attempts})`));
  if (rounds) {
    const mean = (of: (b: Bin) => number): number => bins.reduce((n, b) => n + of(b) * b.rounds, 0) / rounds;
    parts.push(el("span", `bars: learners merged; a round takes ${lasting(mean((b) => b.took[0]))}, grace ${lasting(mean((b) => b.grace[0]))}`));
  }
  return parts;
}

export function total(bins: Bin[], of: (b: Bin) => Record<string, number>): Record<string, number> {
  const sums: Record<string, number> = {};
  for (const b of bins) for (const [name, n] of Object.entries(of(b))) sums[name] = (sums[name] ?? 0) + n;
  return sums;
}

export const FATES = [
  "merged", "in_flight", "discarded_overlap", "discarded_not_in_round", "discarded_lost", "discarded_left", "discarded_rolled_back",
];

export function drawFates(canvas: HTMLCanvasElement, span: Span, bins: Bin[], cursor: number): void {
  const f = frame(canvas, span);
  timeAxis(f, span);
  const y = valueAxis(f, 0, 100, (v) => `${v} %`);
  const { context } = f;
  for (const b of bins) {
    const [x0, x1] = [Math.max(f.left, f.x(b.begins)), Math.min(f.right, Math.max(f.x(b.ends), f.x(b.begins) + 1))];
    let base = 0;
    for (const name of FATES) {
      const share = (100 * (b.fates[name] ?? 0)) / Math.max(1, b.fates["trained"] ?? 0);
      context.fillStyle = FATE_COLOURS[name] ?? OTHER;
      context.fillRect(x0, y(base + share), x1 - x0 + 0.5, y(base) - y(base + share));
      base += share;
    }
  }
  cursorLine(f, cursor);
  canvas.setAttribute("aria-label", "What became of the tokens trained so far, as shares; the table below has the numbers");
}

export function drawOverview(canvas: HTMLCanvasElement, all: Span, bins: Bin[], shown: Span, cursor: number): void {
  const f = frame(canvas, all, { left: 4, top: 2, bottom: 2 });
  const { context } = f;
  const values = bins.flatMap((b) => (b.loss ? [b.loss[1]] : []));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  for (const b of bins) {
    // Below the curve a stripe of all lanes: how much of the learners' time was no training.
    const [x0, x1] = [f.x(b.begins), Math.max(f.x(b.ends), f.x(b.begins) + 1)];
    let base = 0;
    for (let state = STATES.length - 1; state > 0; state -= 1) {
      const share = b.lanes.reduce((n, lane) => n + (lane[2][state] ?? 0), 0) / Math.max(1, 1000 * b.lanes.length);
      context.fillStyle = stateFill(context, state);
      context.fillRect(x0, f.bottom - base - share * 14, x1 - x0, share * 14);
      base += share * 14;
    }
  }
  context.strokeStyle = f.ink.loss;
  context.lineWidth = 1.5;
  context.beginPath();
  let begun = false;
  for (const b of bins) {
    if (!b.loss) continue;
    const y = f.top + 2 + (26 * (high - b.loss[1])) / Math.max(1e-12, high - low);
    if (begun) context.lineTo(f.x((b.begins + b.ends) / 2), y);
    else context.moveTo(f.x((b.begins + b.ends) / 2), y);
    begun = true;
  }
  context.stroke();
  context.fillStyle = f.ink.quiet;
  context.globalAlpha = 0.22;
  context.fillRect(f.left, 0, Math.max(0, f.x(shown.from) - f.left), f.height);
  context.fillRect(f.x(shown.to), 0, Math.max(0, f.right - f.x(shown.to)), f.height);
  context.globalAlpha = 1;
  context.strokeStyle = f.ink.ink;
  context.strokeRect(f.x(shown.from) + 0.5, 0.5, Math.max(2, f.x(shown.to) - f.x(shown.from)), f.height - 1);
  cursorLine({ ...f, bottom: f.height }, cursor);
}
