// The API key: asked for when the server wants one, kept for this tab only.

import { byId, setText } from "./dom.js";

const NAME = "titopool-key";

/** The key of this tab; "" if there is none. */
export const currentKey = () => sessionStorage.getItem(NAME) ?? "";

/** Calls `use` whenever the user has entered a key, and `leave` when the dialog was left without one. */
export function prepareKeyDialog(use, leave) {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    // Others cannot be sent in a header.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      showError(key ? "A key has only printable ASCII characters, without blanks." : "Enter a key.");
      return;
    }
    sessionStorage.setItem(NAME, key);
    byId("key").value = "";
    dialog.close("used");
    use();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "used") leave();
    dialog.returnValue = "";
  });
  byId("change-key").addEventListener("click", () => askForKey(""));
}

/** Opens the dialog; `reason` says what is wrong with the key so far. */
export function askForKey(reason) {
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
  showError(reason);
  byId("key").focus();
}

function showError(text) {
  setText(byId("key-error"), text);
  byId("key").setAttribute("aria-invalid", text ? "true" : "false");
}
