// Texts of numbers, with their units. The same units as those of the command line.

const SPACE = "\u202f";

/** A number with separators; from 100,000 on in thousands or millions. */
export function count(value) {
  if (value === null) return "–";
  if (value < 1e5) return Math.round(value).toLocaleString("en-US");
  if (value < 1e6) return `${(value / 1e3).toFixed(0)}${SPACE}k`;
  if (value < 1e9) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)}${SPACE}M`;
  return `${(value / 1e9).toFixed(2)}${SPACE}G`;
}

/** Bytes in the largest binary unit of which there is at least one. */
export function amount(bytes) {
  if (bytes === null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${unit === "B" || bytes >= 100 ? bytes.toFixed(0) : bytes.toFixed(1)}${SPACE}${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)}${SPACE}TiB`;
}

export const rate = (bytes) => (bytes === null ? "–" : `${amount(bytes)}/s`);

export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}${SPACE}%` : "–");

/** A time in the unit that fits. */
export function span(seconds) {
  if (seconds < 0.9995e-3) return `${(seconds * 1e6).toFixed(0)}${SPACE}µs`;
  if (seconds < 0.99995) return `${(seconds * 1e3).toFixed(1)}${SPACE}ms`;
  if (seconds < 119.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)}${SPACE}s`;
  if (seconds < 7170) return `${(seconds / 60).toFixed(0)}${SPACE}min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(seconds < 36000 ? 1 : 0)}${SPACE}h`;
  return `${(seconds / 86400).toFixed(0)}${SPACE}d`;
}

const two = (value) => String(value).padStart(2, "0");

/** The time of day, in the time zone of the browser. */
export function clock(seconds, withSeconds = true) {
  const time = new Date(seconds * 1000);
  const text = `${two(time.getHours())}:${two(time.getMinutes())}`;
  return withSeconds ? `${text}:${two(time.getSeconds())}` : text;
}
