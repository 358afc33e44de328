// The list of tables, a page at a time.

import { get } from "./api.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { bytes, count, initializer, short } from "./format.js";

const PAGE_SIZE = 50;
const COLUMNS = ["", "number", "number", "number", "mono", "number", "number", "number", "mono"];

/** Lists tables and tells which one was chosen. */
export class TableList {
  /** @param {(name: string) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.chosen = null;
    this.afterName = "";
    this.nextAfterName = null;
    this.pager = byId("tables-pager");
    this.pager.addEventListener("click", (event) => this.move(event.target.dataset.move));
  }

  /** Marks a table as chosen. */
  choose(name) {
    this.chosen = name;
    for (const row of byId("tables").tBodies[0].rows) {
      row.classList.toggle("chosen", row.dataset.key === name);
    }
  }

  /** Reads and shows the page; returns whether the API answered. */
  async refresh() {
    const section = byId("tables").closest("section");
    const afterName = this.afterName;
    try {
      const { body } = await get(`v1/tables?page_size=${PAGE_SIZE}&after_name=${encodeURIComponent(afterName)}`);
      if (afterName !== this.afterName) {
        return true; // another page was chosen meanwhile, and its own answer follows
      }
      this.nextAfterName = body.next_after_name;
      syncRows(byId("tables").tBodies[0], body.tables, (table) => table.name, (table) => this.makeRow(table), updateRow);
      byId("tables-empty").hidden = body.tables.length > 0 || afterName !== "";
      this.pager.hidden = afterName === "" && this.nextAfterName === null;
      this.pager.querySelector("[data-move=first]").disabled = afterName === "";
      this.pager.querySelector("[data-move=next]").disabled = this.nextAfterName === null;
      this.choose(this.chosen);
      showProblem(byId("tables-problem"), missingShards(body.tables));
      section.classList.remove("stale");
      return true;
    } catch (error) {
      showProblem(byId("tables-problem"), error);
      section.classList.add("stale");
      return false;
    }
  }

  move(where) {
    if (where === "next" && this.nextAfterName !== null) {
      this.afterName = this.nextAfterName;
    } else if (where === "first") {
      this.afterName = "";
    } else {
      return;
    }
    void this.refresh();
  }

  makeRow(table) {
    const row = makeCells(COLUMNS);
    const button = make("button", "link", table.name);
    button.type = "button";
    button.addEventListener("click", () => this.onChoose(table.name));
    row.cells[0].append(button);
    return row;
  }
}

function updateRow(row, table) {
  const { memory, spec, last_options: options } = table;
  const moments = memory.exp_avg_bytes === null ? null : memory.exp_avg_bytes + memory.exp_avg_sq_bytes;
  setCells(row, [
    null,
    count(table.num_rows),
    count(spec.dim),
    count(table.table_step),
    initializer(spec.init),
    options === null ? "–" : short(options.lr),
    bytes(memory.weight_bytes),
    bytes(moments),
    table.shards.map((shard) => count(shard.num_rows)).join(" / "),
  ]);
  setText(row.cells[0].firstElementChild, table.name);
}

function missingShards(tables) {
  const missing = new Set(tables.flatMap((table) => table.missing_shards));
  if (missing.size === 0) {
    return null;
  }
  return { reason: "SHARD_UNREACHABLE", detail: `shard ${[...missing].join(", ")} does not answer, so sums are unknown` };
}
