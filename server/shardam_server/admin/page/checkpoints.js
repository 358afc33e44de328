// The list of checkpoints and what home does with them: made, verified, restored and deleted from here.

import { get, send } from "./api.js";
import { confirm } from "./confirming.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const ENDED_S = 60; // how long the end of a job stays on the page
const COLUMNS = ["mono", "", "mono", "number", "number", "number", "", "actions"];
const PILL_OF_JOB = { waiting: "warn", running: "", done: "good", failed: "bad" };
const REPLACED =
  "The state of all shards is replaced, on a new timeline. Programs that are connected now raise ClusterRestored and have to be " +
  "started again. Without exceptions both must have the same tables.";

function pathOf(name, action = "") {
  return `v1/checkpoints/${encodeURIComponent(name)}${action}`;
}

/** Lists checkpoints and jobs. */
export class CheckpointList {
  constructor() {
    byId("create-checkpoint").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = byId("checkpoint-name").value.trim();
      void this.ask(() => send("POST", "v1/checkpoints", { name: name === "" ? null : name }));
    });
  }

  /** Reads and shows them; returns whether the API answered. */
  async refresh() {
    const section = byId("checkpoints").closest("section");
    try {
      const [list, jobs] = await Promise.all([get("v1/checkpoints"), get("v1/jobs")]);
      const { checkpoints } = list.body;
      const makeRow = (checkpoint) => this.makeRow(checkpoint);
      syncRows(byId("checkpoints").tBodies[0], checkpoints, (checkpoint) => checkpoint.name, makeRow, updateRow);
      byId("checkpoints-table").hidden = checkpoints.length === 0;
      byId("checkpoints-empty").hidden = checkpoints.length > 0;
      byId("create-checkpoint").hidden = false;
      showJobs(jobs.body.jobs);
      showProblem(byId("checkpoints-problem"), null);
      showProblem(byId("checkpoints-failed"), lastFailure(jobs.body.jobs));
      section.classList.remove("stale");
      return true;
    } catch (error) {
      const none = error.reason === "BAD_OPTION"; // the cluster has no folder for them
      byId("checkpoints-problem").classList.toggle("mild", none);
      byId("create-checkpoint").hidden = none;
      showProblem(byId("checkpoints-problem"), error);
      section.classList.toggle("stale", !none);
      return none;
    }
  }

  /** Asks home for something, and shows what it refuses until the next time. */
  async ask(request) {
    let problem = null;
    try {
      await request();
      byId("checkpoint-name").value = "";
    } catch (error) {
      problem = error;
    }
    showProblem(byId("checkpoint-answer"), problem);
    await this.refresh();
  }

  makeRow({ name }) {
    const row = makeCells(COLUMNS);
    row.cells[1].append(make("span", "pill"));
    const actions = [
      ["Verify", () => this.ask(() => send("POST", pathOf(name, ":verify")))],
      ["Restore", () => this.restore(name)],
      ["Delete", () => this.remove(name)],
    ];
    actions.forEach(([label, act]) => {
      const button = make("button", "", label);
      button.type = "button";
      button.setAttribute("aria-label", `${label} ${name}`);
      button.addEventListener("click", () => void act());
      row.cells[7].append(button);
    });
    return row;
  }

  async restore(name) {
    const question = { title: `Restore ${name}?`, loss: REPLACED, yes: "Replace the state", withOptions: true };
    const options = await confirm(question);
    if (options !== null) {
      await this.ask(() => send("POST", pathOf(name, ":restore"), options));
    }
  }

  async remove(name) {
    const loss = "Its files are removed for good.";
    if ((await confirm({ title: `Delete ${name}?`, loss, yes: "Delete", withOptions: false })) !== null) {
      await this.ask(() => send("DELETE", pathOf(name)));
    }
  }
}

function updateRow(row, checkpoint) {
  const known = checkpoint.complete;
  setCells(row, [
    checkpoint.name,
    null,
    checkpoint.created ?? "–",
    count(known ? checkpoint.num_rows : null),
    bytes(known ? checkpoint.size_bytes : null),
    count(known ? checkpoint.num_shards : null),
    checkpoint.ranks_with_extra.join(", ") || "–",
    null,
  ]);
  const state = row.cells[1].firstElementChild;
  setText(state, known ? "complete" : "not complete");
  state.className = `pill ${known ? "good" : "bad"}`;
  row.cells[1].title = checkpoint.problem ?? "";
  row.cells[0].title = checkpoint.folder;
  const [verify, restore] = row.cells[7].children;
  verify.disabled = !known;
  restore.disabled = !known;
}

function showJobs(jobs) {
  const shown = jobs.filter((job) => job.seconds === null || job.age_s - job.seconds < ENDED_S);
  byId("jobs").replaceChildren(...shown.map(makeJob));
}

function makeJob(job) {
  const item = make("li");
  item.append(make("span", `pill ${PILL_OF_JOB[job.state] ?? ""}`, job.state));
  item.append(make("span", "", [job.kind, job.checkpoint].filter((word) => word !== null).join(" ")));
  if (job.seconds === null && job.total_bytes !== null) {
    const progress = document.createElement("progress");
    progress.max = job.total_bytes;
    progress.value = job.done_bytes;
    progress.setAttribute("aria-label", `progress of ${job.kind}`);
    item.append(progress);
  }
  item.append(make("span", "detail", jobDetail(job)));
  return item;
}

function jobDetail(job) {
  if (job.state === "failed") {
    return `${job.reason}: ${job.problem}`;
  }
  if (job.report !== null) {
    return job.report.tables.map((table) => `${table.table} ${tableWords(table)}`).join("; ") + `. ${job.report.options_rule}`;
  }
  if (job.seconds !== null) {
    return `${bytes(job.done_bytes)} in ${duration(job.seconds)}`;
  }
  const done = job.total_bytes === null ? "" : `${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`;
  return [done, job.phase, job.problem].filter((word) => word).join(", ");
}

function tableWords(table) {
  const words = [table.outcome];
  if (table.outcome === "loaded") {
    words.push(`${count(table.num_rows)} rows`);
  }
  if (table.moments_reset) {
    words.push("moments begin anew");
  }
  if (table.read_only) {
    words.push("read-only");
  }
  return words.join(", ");
}

/** The last checkpoint that was tried, if it failed: training goes on, but nothing newer is there to come back to. */
function lastFailure(jobs) {
  const last = jobs.find((job) => job.kind === "create" && job.seconds !== null);
  if (last === undefined || last.state !== "failed") {
    return null;
  }
  return { reason: last.reason, detail: `the last checkpoint could not be made: ${last.problem}` };
}
