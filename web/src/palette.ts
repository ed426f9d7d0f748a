// Colours that people with any colour vision tell apart (after Okabe and Ito), and for lanes a pattern too, so that nothing is said by
// colour alone.

export const STATES = ["training", "waiting", "joining", "silent", "lost", "left"] as const;
export const STATE_MARKS = ["▶", "‖", "↻", "…", "✕", "○"] as const;
const STATE_COLOURS = ["#0072b2", "#c9b400", "#56b4e9", "#e69f00", "#d55e00", "#8a8f94"] as const;
const PATTERNS = ["plain", "dots", "rising", "dots", "falling", "plain"] as const;

export const WHY_COLOURS: Record<string, string> = { all_reported: "#0072b2", window_closed: "#e69f00", rolled_back: "#cc79a7" };
export const FATE_COLOURS: Record<string, string> = {
  merged: "#0072b2",
  in_flight: "#56b4e9",
  discarded_overlap: "#e69f00",
  discarded_not_in_round: "#c9b400",
  discarded_lost: "#d55e00",
  discarded_left: "#8a8f94",
  discarded_rolled_back: "#cc79a7",
};
export const OTHER = "#8a8f94";
export const HELDOUT = "#d55e00";

export interface Ink {
  ink: string;
  quiet: string;
  line: string;
  paper: string;
  loss: string;
}

export function ink(): Ink {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string): string => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), paper: of("--paper"), loss: of("--loss") };
}

const made = new Map<number, CanvasPattern | string>();

export function stateFill(context: CanvasRenderingContext2D, state: number): CanvasPattern | string {
  const known = made.get(state);
  if (known) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const draw = tile.getContext("2d")!;
  draw.fillStyle = STATE_COLOURS[state] ?? OTHER;
  draw.fillRect(0, 0, 8, 8);
  draw.strokeStyle = draw.fillStyle = "rgba(255,255,255,.75)";
  draw.lineWidth = 1.6;
  const pattern = PATTERNS[state] ?? "plain";
  if (pattern === "dots") draw.fillRect(3, 3, 2, 2);
  if (pattern === "rising" || pattern === "falling") {
    draw.beginPath();
    for (const shift of [-8, 0, 8]) {
      draw.moveTo(shift, pattern === "rising" ? 8 : 0);
      draw.lineTo(shift + 8, pattern === "rising" ? 0 : 8);
    }
    draw.stroke();
  }
  const fill = pattern === "plain" ? (STATE_COLOURS[state] ?? OTHER) : context.createPattern(tile, "repeat")!;
  made.set(state, fill);
  return fill;
}
