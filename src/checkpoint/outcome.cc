#include "checkpoint/outcome.h"

#include <new>

namespace shardsmith {
namespace {

constexpr ErrorKind kKinds[] = {ErrorKind::kInvalidArgument, ErrorKind::kNotFound, ErrorKind::kUnsupported,
                                ErrorKind::kCorrupt,         ErrorKind::kMismatch, ErrorKind::kIo,
                                ErrorKind::kNoSpace,         ErrorKind::kTimeout,  ErrorKind::kPeer,
                                ErrorKind::kInterrupted};

ErrorKind kind_from(const std::string& word) {
  for (ErrorKind kind : kKinds) {
    if (to_string(kind) == word) return kind;
  }
  return ErrorKind::kPeer;
}

Value failure(ErrorKind kind, const std::string& text, int rank = -1) {
  Value message;
  message.set("kind", std::string(to_string(kind)));
  message.set("error", text);
  message.set("rank", rank);
  return message;
}

Value outcome_of(const std::function<Value()>& work) {
  try {
    Value message;
    message.set("value", work());
    return message;
  } catch (const Error& e) {
    return failure(e.kind(), e.what(), e.rank());
  } catch (const std::bad_alloc&) {
    return failure(ErrorKind::kIo, "out of memory");
  } catch (const std::exception& e) {
    return failure(ErrorKind::kIo, e.what());
  }
}

std::string text_of(const Value& message, const char* key) {
  const Value* found = message.find(key);
  const std::string* text = found ? found->get_if<std::string>() : nullptr;
  return text ? *text : "";
}

}  // namespace

std::vector<Value> all_do(Peers& peers, std::chrono::milliseconds deadline, const std::function<Value()>& work) {
  const std::vector<std::string> answers = peers.exchange(to_json(outcome_of(work)), deadline);
  std::vector<Value> values;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const Value message = parse_json(answers[rank], str("the message of rank ", rank));
    if (const Value* value = message.find("value")) {
      values.push_back(*value);
      continue;
    }
    const std::string text = text_of(message, "error");
    // One that names a rank already stays as it is.
    const Value* at_fault = message.find("rank");
    const int64_t* named = at_fault ? at_fault->get_if<int64_t>() : nullptr;
    if (named && *named >= 0) throw Error(kind_from(text_of(message, "kind")), text, static_cast<int>(*named));
    if (peers.size() == 1) throw Error(kind_from(text_of(message, "kind")), text);
    throw Error(kind_from(text_of(message, "kind")), str("rank ", rank, ": ", text), static_cast<int>(rank));
  }
  return values;
}

}  // namespace shardsmith
