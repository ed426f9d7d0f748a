// Numbers and times for people.

export function clock(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 60) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const whole = Math.floor(s);
  const two = (n: number): string => String(n).padStart(2, "0");
  const [h, m, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${two(h % 24)}:${two(m)} h`;
  return h ? `${h}:${two(m)}:${two(rest)} h` : `${m}:${two(rest)} min`;
}

export function lasting(seconds: number): string {
  if (seconds >= 120) return clock(seconds);
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 0.001) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds > 0 ? `${Math.round(1e6 * seconds)} µs` : "0 s";
}

const UNITS = ["", "k", "M", "G", "T", "P"];

export function count(value: number, unit = ""): string {
  let at = 0;
  let v = value;
  while (Math.abs(v) >= 1000 && at < UNITS.length - 1) {
    v /= 1000;
    at += 1;
  }
  const digits = at === 0 ? 0 : v < 10 ? 2 : v < 100 ? 1 : 0;
  const name = `${UNITS[at]}${unit}`;
  return name ? `${v.toFixed(digits)} ${name}` : v.toFixed(digits);
}

export const bytes = (value: number): string => count(value, "B");

export function percent(part: number, whole: number): string {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share.toFixed(share > 0 && share < 10 ? 1 : 0)} %`;
}

export const thousands = (value: number): string => value.toLocaleString("en");
export const some = (n: number, what: string): string => `${thousands(n)} ${what}${n === 1 ? "" : "s"}`;

export function ids(learners: readonly number[]): string {
  // 0, 1, 2, 5 as "0–2, 5"
  const parts: string[] = [];
  for (let i = 0; i < learners.length; ) {
    let j = i;
    while (j + 1 < learners.length && learners[j + 1] === learners[j]! + 1) j += 1;
    parts.push(j > i + 1 ? `${learners[i]}–${learners[j]}` : learners.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.join(", ");
}
