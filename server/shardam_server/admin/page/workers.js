// The list of workers, a page at a time, and the groups that wait for one of theirs.

import { get } from "./api.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { count, duration } from "./format.js";

const PAGE_SIZE = 50;
const WAITS_S = 3; // a group waits a little before every step; beyond this a person should know
const COLUMNS = ["mono", "", "", "", "number", "number", "number", "number", "number"];

/** Lists workers. */
export class WorkerList {
  constructor() {
    this.cursor = "";
    this.nextCursor = null;
    this.pager = byId("workers-pager");
    this.pager.addEventListener("click", (event) => this.move(event.target.dataset.move));
  }

  /** Reads and shows the page; returns whether the API answered. */
  async refresh() {
    const section = byId("workers").closest("section");
    const cursor = this.cursor;
    try {
      const { body } = await get(`v1/workers?page_size=${PAGE_SIZE}&cursor=${encodeURIComponent(cursor)}`);
      if (cursor !== this.cursor) {
        return true; // another page was chosen meanwhile, and its own answer follows
      }
      this.nextCursor = body.next_cursor;
      syncRows(byId("workers").tBodies[0], body.workers, (worker) => worker.client_id, makeRow, updateRow);
      byId("workers-table").hidden = body.workers.length === 0;
      byId("workers-empty").hidden = body.workers.length > 0 || cursor !== "";
      this.pager.hidden = cursor === "" && this.nextCursor === null;
      this.pager.querySelector("[data-move=first]").disabled = cursor === "";
      this.pager.querySelector("[data-move=next]").disabled = this.nextCursor === null;
      showProblem(byId("workers-problem"), null);
      showProblem(byId("workers-waiting"), waits(body.waiting_groups));
      section.classList.remove("stale");
      return true;
    } catch (error) {
      showProblem(byId("workers-problem"), error);
      section.classList.add("stale");
      return false;
    }
  }

  move(where) {
    if (where === "next" && this.nextCursor !== null) {
      this.cursor = this.nextCursor;
    } else if (where === "first") {
      this.cursor = "";
    } else {
      return;
    }
    void this.refresh();
  }
}

function makeRow() {
  const row = makeCells(COLUMNS);
  row.cells[1].append(make("span", "pill"));
  return row;
}

function updateRow(row, worker) {
  setCells(row, [
    worker.client_id.slice(0, 12),
    null,
    worker.group ?? "–",
    worker.rank === null ? "–" : `${worker.rank} of ${worker.world_size}`,
    count(worker.restart_count),
    count(worker.step),
    count(worker.staleness),
    count(worker.last_number),
    `${duration(worker.last_heartbeat_s)} ago`,
  ]);
  const mode = row.cells[1].firstElementChild;
  setText(mode, worker.mode === "bounded" ? `bounded:${worker.max_staleness}` : worker.mode);
  updateArrivedPill(row.cells[1], worker.arrived === true);
  row.cells[0].title = worker.client_id;
  row.cells[1].title = worker.reduce === null ? "" : `reduce ${worker.reduce}`;
}

/** Adds or removes the second pill, which only a member has that waits for others. */
function updateArrivedPill(cell, arrived) {
  const shown = cell.children[1] ?? null;
  if (!arrived) {
    shown?.remove();
  } else if (shown === null) {
    cell.append(make("span", "pill good", "arrived"));
  }
}

function waits(groups) {
  const long = groups.filter((group) => group.waited_s >= WAITS_S);
  return long.length === 0 ? null : { reason: "WAITING", detail: long.map((group) => group.summary).join("; ") };
}
