// Drawing on canvases over one axis of time.

import { clock } from "./format";
import { ink, type Ink } from "./palette";

export interface Span {
  from: number;
  to: number;
}

export interface Frame {
  context: CanvasRenderingContext2D;
  width: number;
  height: number;
  left: number;
  right: number;
  top: number;
  bottom: number;
  ink: Ink;
  x: (time: number) => number;
}

export const LEFT = 46;
export const RIGHT = 8;

export function frame(canvas: HTMLCanvasElement, span: Span, { left = LEFT, top = 6, bottom = 20 } = {}): Frame {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 300;
  const height = Number(canvas.getAttribute("data-height") ?? canvas.getAttribute("height"));
  if (!canvas.hasAttribute("data-height")) canvas.setAttribute("data-height", String(height));
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  const room = width - left - RIGHT;
  const across = Math.max(1e-9, span.to - span.from);
  const x = (time: number): number => left + (room * (time - span.from)) / across;
  return { context, width, height, left, right: width - RIGHT, top, bottom: height - bottom, ink: ink(), x };
}

export function timeOf(canvas: HTMLCanvasElement, span: Span, clientX: number, left = LEFT): number {
  const box = canvas.getBoundingClientRect();
  const share = (clientX - box.left - left) / Math.max(1, box.width - left - RIGHT);
  return span.from + Math.min(1, Math.max(0, share)) * (span.to - span.from);
}

function nice(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

export function timeAxis(f: Frame, span: Span): void {
  const rough = (span.to - span.from) / Math.max(2, f.width / 130);
  const step = rough < 1 ? nice(rough) : (TIMES.find((t) => t >= rough) ?? nice(rough));
  const { context } = f;
  context.fillStyle = f.ink.quiet;
  context.strokeStyle = f.ink.line;
  context.lineWidth = 1;
  context.textBaseline = "top";
  for (let t = Math.ceil(span.from / step) * step; t <= span.to; t += step) {
    const x = Math.round(f.x(t)) + 0.5;
    context.beginPath();
    context.moveTo(x, f.top);
    context.lineTo(x, f.bottom);
    context.stroke();
    const text = clock(t);
    const wide = context.measureText(text).width;
    context.textAlign = "left";
    context.fillText(text, Math.min(Math.max(f.left, x - wide / 2), f.right - wide), f.bottom + 4);
  }
}

export function valueAxis(f: Frame, low: number, high: number, show: (v: number) => string = String, whole = false): (v: number) => number {
  const y = (v: number): number => f.bottom - ((f.bottom - f.top) * (v - low)) / Math.max(1e-12, high - low);
  const step = Math.max(whole ? 1 : 0, nice(Math.max(1e-9, (high - low) / 4)));
  const { context } = f;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) {
    context.strokeStyle = f.ink.line;
    context.beginPath();
    context.moveTo(f.left, Math.round(y(v)) + 0.5);
    context.lineTo(f.right, Math.round(y(v)) + 0.5);
    context.stroke();
    context.fillStyle = f.ink.quiet;
    context.fillText(show(Number(v.toPrecision(6))), f.left - 6, y(v));
  }
  return y;
}

export function cursorLine(f: Frame, time: number): void {
  if (time < 0) return;
  const x = Math.round(f.x(time)) + 0.5;
  if (x < f.left - 1 || x > f.right + 1) return;
  f.context.strokeStyle = f.ink.ink;
  f.context.lineWidth = 1.5;
  f.context.beginPath();
  f.context.moveTo(x, 0);
  f.context.lineTo(x, f.bottom);
  f.context.stroke();
  f.context.lineWidth = 1;
}

export function nothing(f: Frame, text: string): void {
  f.context.fillStyle = f.ink.quiet;
  f.context.textAlign = "center";
  f.context.textBaseline = "middle";
  f.context.fillText(text, f.width / 2, (f.top + f.bottom) / 2);
}

export function swatch(fill: (context: CanvasRenderingContext2D) => CanvasPattern | string): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = 16;
  canvas.height = 12;
  canvas.className = "swatch";
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d")!;
  context.fillStyle = fill(context);
  context.fillRect(0, 0, 16, 12);
  return canvas;
}

export function el<K extends keyof HTMLElementTagNameMap>(
  name: K, text = "", attributes: Record<string, string> = {}, ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
