// pt and dcp: formats that hold a whole tree of values.
#include "base/error.h"
#include "cli/signals.h"
#include "cli/writers.h"
#include "format/dcp.h"
#include "format/pt.h"

namespace shardsmith::cli {
namespace {

// A model alone is itself; with an optimizer or values beside it, it is one entry of a dict, as training scripts save
// it.
Value tree_of(const Content& content, FileBuilder& file) {
  Value model = file.import(content.model);
  if (content.optimizer.is_none() && content.beside.items.empty()) return model;
  Value tree;
  tree.set("model", std::move(model));
  if (!content.optimizer.is_none()) tree.set("optimizer", file.import(content.optimizer));
  for (const auto& [key, item] : content.beside.items) tree.set(*key.get_if<std::string>(), file.import(item));
  return tree;
}

}  // namespace

void write_pt_target(Job& job) {
  FileBuilder file(job.feed, false);
  Value tree = tree_of(job.content, file);
  const uint64_t bytes = file.bytes();
  const PtContent content = file.finish(std::move(tree), false);
  job.result.tensors = content.tensors.size();
  StagedOutput out(job.storage, job.request.to, job.request.overwrite);
  job.announce(bytes, 1);
  write_pt(job.storage, out.temporary(), content);
  job.finish();
  job.publish(out);
}

void write_dcp_target(Job& job) {
  FileBuilder file(job.feed, true);
  Value tree = tree_of(job.content, file);
  if (!tree.get_if<Dict>())
    fail(ErrorKind::kUnsupported, job.request.from, ": is no dict of names, and DCP holds nothing else");
  const uint64_t bytes = file.bytes();
  const PtContent content = file.finish(std::move(tree), false);
  job.result.tensors = content.tensors.size();
  StagedOutput out(job.storage, job.request.to, job.request.overwrite);
  job.announce(bytes, 1);
  out.make_folder();
  write_dcp(job.storage, out.temporary(), content);
  job.finish();
  job.publish(out);
}

}  // namespace shardsmith::cli
