// Asks a person before something is given up.

import { byId, setText } from "./dom.js";

/** The exceptions of a restore that can be chosen beside the question. */
function restoreOptions() {
  return [...byId("restore-options").querySelectorAll("input")];
}

/**
 * Shows a question and waits for the answer.
 *
 * @param {{title: string, loss: string, yes: string, withOptions: boolean}} question what is done, what is given up, the word of
 *   the button, and whether the exceptions of a restore are to be chosen
 * @returns {Promise<Record<string, boolean> | null>} the exceptions that were chosen; null: the answer is no
 */
export function confirm({ title, loss, yes, withOptions }) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-loss"), loss);
  setText(byId("confirm-yes"), yes);
  byId("restore-options").hidden = !withOptions;
  restoreOptions().forEach((box) => {
    box.checked = false;
  });
  return new Promise((resolve) => {
    let agreed = false;
    byId("confirm-no").onclick = () => dialog.close();
    byId("confirm-yes").onclick = () => {
      agreed = true;
      dialog.close();
    };
    dialog.onclose = () => {
      const chosen = Object.fromEntries(restoreOptions().map((box) => [box.name, box.checked]));
      resolve(agreed ? chosen : null);
    };
    dialog.showModal();
    byId("confirm-no").focus();
  });
}
