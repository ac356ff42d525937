// JSON -> Value -> JSON.
#include "base/value.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Value value;
  if (!errors_only([&] { value = parse_json(input, "f"); })) return;
  for (const int indent : {-1, 2}) {
    const std::string text = to_json(value, indent);
    try {
      require(parse_json(text, "f") == value, "a value that comes back as another one");
    } catch (const Error& e) {
      broken(str("what we write we can't read: ", e.what()));
    }
  }
  const Value restored = restore_kinds(value);
  Value again;
  if (errors_only([&] { again = restore_kinds(parse_json(to_json(restored), "f")); }))
    require(again == restored, "a restored value that comes back as another one");
}

const Registration registered("json", run);

}  // namespace
}  // namespace shardsmith::fuzz
