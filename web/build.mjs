// Builds the page into the Python package. `sources.sha256` says which sources the built files belong to; a test compares it.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "src", "atoll", "runtime", "watch", "page");
mkdirSync(out, { recursive: true });

await build({
  entryPoints: [join(here, "src", "main.ts")],
  outfile: join(out, "page.js"),
  bundle: true,
  format: "iife",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
});
for (const name of ["page.html", "page.css"]) copyFileSync(join(here, "src", name), join(out, name));

const hash = createHash("sha256");
const files = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json", ...readdirSync(join(here, "src")).map((n) => `src/${n}`)];
for (const name of files.sort()) {
  hash.update(name + "\0");
  hash.update(readFileSync(join(here, name)));
  hash.update("\0");
}
writeFileSync(join(out, "sources.sha256"), hash.digest("hex") + "\n");
