// The button "Finish now" on Train LoRA: ends the run that is under way early, with its outputs.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

app.registerExtension({
  name: "graft.finish",
  nodeCreated(node) {
    if (node.comfyClass !== "GraftTrain") return;
    const button = node.addWidget(
      "button",
      "Finish now",
      null,
      async () => {
        const answer = await api.fetchApi("/graft/finish", {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify({ node_id: String(node.id) }),
        });
        if (answer.ok) return;
        app.extensionManager?.toast?.add({
          severity: "info",
          summary: "Finish now",
          detail: "This node is not training.",
          life: 4000,
        });
      },
      { serialize: false },
    );
    // A button has no value: neither the workflow nor the prompt is to hold one.
    button.serialize = false;
  },
});
