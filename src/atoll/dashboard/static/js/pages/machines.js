import { empty } from "../lib/ui.js";

export const page = {
  mount(root) {
    root.append(empty("Not here yet", "This page is being made."));
  },
};
