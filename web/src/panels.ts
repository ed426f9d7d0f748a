// The round at the cursor in words, and the tables of links, fates and events.

import type { Bin, Happened, Round } from "./api";
import { el, swatch } from "./charts";
import { FATES } from "./curves";
import { bytes, clock, count, ids, lasting, percent, thousands } from "./format";
import { FATE_COLOURS, OTHER, STATE_MARKS } from "./palette";

const CLOSED: Record<string, string> = {
  all_reported: "It closed because every learner in sync had reported.",
  window_closed: "It closed when its grace window did: the quorum was met, and nobody was waited for any longer.",
  rolled_back: "An operator rolled the run back: nothing was merged.",
};

export function showRound(box: HTMLElement, title: HTMLElement, round: Round | null): void {
  if (!round) {
    title.textContent = "Round";
    box.replaceChildren(el("p", "No round is closed yet.", { class: "quiet" }));
    return;
  }
  title.textContent = `Round ${thousands(round.outer_step)}`;
  const due = round.fragments.length ? `fragment${round.fragments.length > 1 ? "s" : ""} ${ids(round.fragments)}` : "no fragment was due";
  const parts: Node[] = [
    el("p", CLOSED[round.why] ?? round.why, { class: "sentence", id: "why" }),
    el("p", `${round.text ? `${round.text} · ` : ""}${due} · ${round.merged.length} merged of ${round.participants.length} that took part · at ${clock(round.closed)}`, { class: "quiet" }),
    steps(round),
    chips(round),
  ];
  for (const attempt of round.attempts) parts.push(el("p", `✕ ${clock(attempt.at)}: given up and gathered again: ${attempt.text}`));
  for (const drop of round.discards) parts.push(el("p", `⊘ ${clock(drop.at)}: learner ${drop.learner} dropped out: ${drop.text}`));
  if (round.refused) parts.push(el("p", `${thousands(round.refused)} messages were refused.`));
  box.replaceChildren(...parts);
}

function steps(round: Round): HTMLElement {
  const phases: [string, number, number][] = [
    ["gathering, until the quorum", round.opened, round.quorum],
    ["grace, until the participants were fixed", round.quorum, round.fixed],
    ["pulling and merging, until it was durable", round.fixed, round.closed],
  ];
  const whole = Math.max(1e-9, round.closed - round.opened);
  const list = el("dl", "", { class: "phases" });
  for (const [name, from, to] of phases) {
    const meter = el("span", "", { class: "meter" });
    meter.style.width = `${Math.max(1, Math.round((60 * (to - from)) / whole))}px`;
    list.append(el("div", "", {}, el("dt", name), el("dd", "", {}, `${lasting(to - from)} `, meter)));
  }
  return list;
}

const CHIPS_MOST = 16;

function chips(round: Round): HTMLElement {
  const groups = new Map<string, number[]>();
  for (const lane of round.lanes) {
    const learner = lane[0];
    const word = round.merged.includes(learner)
      ? "✓ merged"
      : round.participants.includes(learner)
        ? "⊘ dropped out"
        : round.left_out.includes(learner)
          ? "– not in this round"
          : `${STATE_MARKS[lane[1]] ?? ""} absent`;
    groups.set(word, [...(groups.get(word) ?? []), learner]);
  }
  if (round.lanes.length > CHIPS_MOST) {
    const lines = [...groups].map(([word, learners]) => el("p", `${word}: ${learners.length} learners (${ids(learners)})`));
    return el("div", "", { class: "groups" }, ...lines);
  }
  const list = el("ul", "", { class: "chips", "aria-label": "learners" });
  for (const [word, learners] of groups)
    for (const learner of learners) list.append(el("li", `${learner} ${word}`, { class: word.startsWith("✓") ? "merged" : "out" }));
  return list;
}

export function showFates(table: HTMLTableElement, fates: Record<string, number> | undefined): void {
  const trained = fates?.["trained"] ?? 0;
  const rows = FATES.filter((name) => fates?.[name]).map((name) =>
    el("tr", "", {}, el("td", "", {}, swatch(() => FATE_COLOURS[name] ?? OTHER), ` ${name.replace("discarded_", "discarded: ").replaceAll("_", " ")}`),
      el("td", percent(fates![name]!, trained), { class: "number" }), el("td", count(fates![name]!), { class: "number" })),
  );
  const head = el("tr", "", {}, el("th", "(token, fragment) pairs so far"), el("th", "share", { class: "number" }), el("th", count(trained), { class: "number" }));
  table.replaceChildren(head, ...rows);
}

interface LinkSum {
  up: number;
  down: number;
  announced: number;
  merged: number;
  tokens: number;
}

export function showLinks(table: HTMLTableElement, bins: Bin[]): void {
  const sums = new Map<number, LinkSum>();
  for (const bin of bins)
    for (const [learner, , , , tokens, , up, down, announced, merged] of bin.lanes) {
      const sum = sums.get(learner) ?? { up: 0, down: 0, announced: 0, merged: 0, tokens: 0 };
      sum.up += up;
      sum.down += down;
      sum.announced += announced;
      sum.merged += merged;
      sum.tokens += tokens;
      sums.set(learner, sum);
    }
  const took = Math.max(1e-9, (bins.at(-1)?.ends ?? 0) - (bins[0]?.begins ?? 0));
  const most = Math.max(1, ...[...sums.values()].map((s) => s.up));
  const down = [...sums.values()].some((s) => s.down > 0);
  const counted = [...sums.values()].some((s) => s.up + s.down + s.announced > 0); // an all-reduce inside torch is not
  const right = { class: "number", scope: "col" }, wide = { class: "number wide", scope: "col" };
  const head = el("tr", "", {}, el("th", "learner"), el("th", "up", right), el("th", "", { class: "wide" }), el("th", down ? "down" : "versions down", right),
    el("th", "up, per second", wide), el("th", "merged in", wide), el("th", "tokens", right));
  const rows = [...sums].sort((a, b) => a[0] - b[0]).map(([learner, s]) => {
    const meter = el("span", "", { class: "meter" });
    meter.style.width = `${Math.round((48 * s.up) / most)}px`;
    const cell = (text: string, kind = "number"): HTMLElement => el("td", text, { class: kind });
    const known = (text: string, kind?: string): HTMLElement => cell(counted ? text : "–", kind);
    return el("tr", "", {}, el("td", String(learner)), known(bytes(s.up)), el("td", "", { class: "wide" }, meter), known(down ? bytes(s.down) : thousands(s.announced)),
      known(`${bytes(s.up / took)}/s`, "number wide"), cell(`${thousands(s.merged)} rounds`, "number wide"), cell(count(s.tokens)));
  });
  table.replaceChildren(head, ...rows);
}

const MARKS: Record<string, string> = {
  recovered: "↺", refused: "⊘", aborted: "✕", rollback: "⟲", snapshot: "▣", syncer_started: "⚡", finished: "■",
};

export function showEvents(list: HTMLElement, line: HTMLElement, answer: { count: number; events: Happened[] }, go: (at: number) => void): void {
  const shown = answer.events.length;
  line.textContent = answer.count > shown ? `the last ${shown} of ${thousands(answer.count)} in this window` : `${thousands(answer.count)} in this window`;
  list.replaceChildren(
    ...[...answer.events].reverse().map((event) => {
      const mark = event.kind === "standing" ? (STATE_MARKS[event.state ?? 5] ?? "") : (MARKS[event.kind] ?? "·");
      const button = el("button", "", { "data-kind": event.kind }, el("span", clock(event.at)), el("span", mark, { class: "mark" }), el("span", event.text));
      button.addEventListener("click", () => go(event.at));
      return el("li", "", {}, button);
    }),
  );
}
