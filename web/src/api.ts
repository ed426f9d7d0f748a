// What the server tells, and how it is asked. No other address is ever asked.

export type Lane = [
  learner: number, state: number, permille: number[], steps: number, tokens: number, stepSeconds: number,
  up: number, down: number, announced: number, merged: number, loss: number | null,
];

export interface Status {
  name: string;
  state: "starting" | "live" | "stopped" | "finished" | "cut";
  settings: { preset: string; learners: number; total_steps: number; fragments: number; quorum: string; model: string; seed: number } | null;
  rounds: number;
  events: number;
  first_step: number;
  last_step: number;
  ends: number;
  epoch: number;
  virtual: boolean;
  lanes: [learner: number, state: number, since: number, loss: number | null][];
  loss: number | null;
  heldout: number;
  chaos: string[];
}

export interface Bin {
  first: number;
  last: number;
  begins: number;
  ends: number;
  rounds: number;
  merging: number;
  merged: [least: number, mean: number, most: number];
  took: [mean: number, most: number];
  grace: [mean: number, most: number];
  whys: Record<string, number>;
  attempts: number;
  discards: number;
  refused: number;
  lost: number;
  recovered: number;
  loss: [least: number, mean: number, most: number] | null;
  fates: Record<string, number>;
  lanes: Lane[];
}

export interface Round {
  outer_step: number;
  begins: number;
  opened: number;
  quorum: number;
  fixed: number;
  closed: number;
  fragments: number[];
  participants: number[];
  merged: number[];
  left_out: number[];
  why: string;
  text: string;
  loss: number | null;
  fates: Record<string, number>;
  lanes: Lane[];
  attempts: { at: number; why: string; text: string }[];
  discards: { learner: number; at: number; why: string; text: string }[];
  refused: number;
  lost: number;
  recovered: number;
}

export interface Happened {
  at: number;
  kind: string;
  learner: number | null;
  outer_step: number;
  text: string;
  state: number | null;
  seconds: number;
}

export interface Point {
  outer_step: number;
  loss: number | null;
}

const token = new URLSearchParams(location.search).get("token") ?? "";
const auth = { Authorization: `Bearer ${token}` };

async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const answer = await fetch(path, { headers: auth, signal: signal ?? null });
  if (!answer.ok) throw new Error(await answer.text());
  return (await answer.json()) as T;
}

export const status = (): Promise<Status> => get("/api/status");
export const bins = (from: number, to: number, most: number, signal?: AbortSignal): Promise<Bin[]> =>
  get(`/api/bins?from=${from}&to=${to}&most=${most}`, signal);
export const roundAt = (at: number, signal?: AbortSignal): Promise<Round | null> => get(`/api/round_at?at=${at}`, signal);
export const round = async (step: number, signal?: AbortSignal): Promise<Round | null> =>
  (await get<Round[]>(`/api/rounds?first=${step}&last=${step}`, signal))[0] ?? null;
export const events = (from: number, to: number, most: number, signal?: AbortSignal): Promise<{ count: number; events: Happened[] }> =>
  get(`/api/events?from=${from}&to=${to}&most=${most}`, signal);
export const heldout = (): Promise<Point[]> => get("/api/heldout");

export async function strike(fault: string, learner: number): Promise<string> {
  const answer = await fetch("/api/fault", {
    method: "POST",
    headers: { ...auth, "Content-Type": "application/json" },
    body: JSON.stringify({ fault, learner }),
  });
  if (!answer.ok) throw new Error(await answer.text());
  return ((await answer.json()) as { said: string }).said;
}

// Server-sent events by fetch, because an EventSource cannot send the token in a header.
export async function news(told: (status: Status) => void): Promise<void> {
  const answer = await fetch("/api/news", { headers: auth });
  if (!answer.ok || !answer.body) throw new Error(await answer.text());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const line = rest.slice(0, end);
      rest = rest.slice(end + 2);
      if (line.startsWith("data: ")) told(JSON.parse(line.slice(6)) as Status);
    }
  }
}
