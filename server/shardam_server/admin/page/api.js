// Calls of the admin API. Ids stay strings from end to end: a number would lose digits beyond 2^53.

const TIMEOUT_MS = 15000; // longer than the server waits for a shard

/** An error that the API answered, or that kept it from answering. */
export class Problem extends Error {
  /**
   * @param {string} reason stable reason, e.g. UNKNOWN_ROW
   * @param {string} detail what was wrong, and what to do
   * @param {Record<string, unknown>} members the whole problem
   */
  constructor(reason, detail, members = {}) {
    super(detail);
    this.reason = reason;
    this.detail = detail;
    this.members = members;
  }
}

/**
 * Reads one resource.
 *
 * @param {string} path relative to the page, so that a proxy may add a prefix
 * @returns {Promise<{body: any, etag: string | null}>}
 * @throws {Problem}
 */
export async function get(path) {
  return call(path, { cache: "no-store" });
}

/**
 * Asks for a change.
 *
 * @param {string} method POST or DELETE
 * @param {string} path relative to the page
 * @param {object | null} value sent as JSON; null: no body
 * @returns {Promise<{body: any, etag: string | null}>}
 * @throws {Problem}
 */
export async function send(method, path, value = null) {
  const body = value === null ? {} : { body: JSON.stringify(value), headers: { "Content-Type": "application/json" } };
  return call(path, { method, ...body });
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    throw new Problem("NO_ANSWER", `the admin API does not answer (${error.message})`);
  }
  let body;
  try {
    body = await response.json();
  } catch (error) {
    throw new Problem("NO_ANSWER", `the answer of ${response.url} (status ${response.status}) is no JSON (${error.message})`);
  }
  if (!response.ok) {
    throw new Problem(body.reason ?? `HTTP_${response.status}`, body.detail ?? response.statusText, body);
  }
  return { body, etag: response.headers.get("ETag") };
}

/** Returns the path of a table's resource. */
export function tablePath(table, rest = "") {
  return `v1/tables/${encodeURIComponent(table)}${rest}`;
}
