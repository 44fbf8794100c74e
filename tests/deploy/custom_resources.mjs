// Reads objects as JSON from standard input and prints, for each, null or what the schema of its kind refuses.
// Argument: a directory with the packages @kubernetes-models/* in node_modules.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = {
  "cert-manager.io": "cert-manager",
  "monitoring.coreos.com": "prometheus-operator",
  "keda.sh": "keda",
};

const answers = [];
for (const made of JSON.parse(readFileSync(0, "utf8"))) {
  const [group] = made.apiVersion.split("/");
  const file = `${process.argv[2]}/node_modules/@kubernetes-models/${packages[group]}/${made.apiVersion}/${made.kind}.js`;
  const kinds = await import(pathToFileURL(file).href);
  try {
    new kinds[made.kind](made).validate();
    answers.push(null);
  } catch (error) {
    answers.push(String(error.message));
  }
}
console.log(JSON.stringify(answers));
