// Ranks as processes of this machine that talk over socket pairs, for tests in which some of them die.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/peers.h"
#include "base/transport.h"

namespace shardsmith {

// One rank's sockets to all others; owns them. By one thread.
class Sockets {
 public:
  explicit Sockets(std::map<int, int> by_rank) : sockets_(std::move(by_rank)) {
    for (const auto& [rank, socket] : sockets_) ::fcntl(socket, F_SETFL, O_NONBLOCK);
  }
  ~Sockets() {
    for (const auto& [rank, socket] : sockets_) ::close(socket);
  }
  Sockets(const Sockets&) = delete;

  // As Transport::move.
  void move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds deadline) {
    const auto end = std::chrono::steady_clock::now() + deadline;
    std::vector<size_t> sent(out.size(), 0), received(in.size(), 0);
    while (true) {
      std::vector<pollfd> polls;
      int waits_for = -1;
      for (size_t i = 0; i < out.size(); ++i) {
        if (sent[i] < out[i].bytes.size() && !send_some(out[i], sent[i]))
          polls.push_back({sockets_.at(waits_for = out[i].to), POLLOUT, 0});
      }
      for (size_t i = 0; i < in.size(); ++i) {
        if (received[i] < in[i].bytes.size() && !receive_some(in[i], received[i]))
          polls.push_back({sockets_.at(waits_for = in[i].from), POLLIN, 0});
      }
      if (polls.empty()) return;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (left.count() <= 0 || ::poll(polls.data(), polls.size(), static_cast<int>(left.count())) <= 0)
        throw Error(ErrorKind::kTimeout, str("no answer from rank ", waits_for), waits_for);
    }
  }

 private:
  [[noreturn]] static void dead(int rank) { throw Error(ErrorKind::kPeer, str("rank ", rank, " is dead"), rank); }
  // Both: whether all is done.
  bool send_some(const Outgoing& out, size_t& done) {
    while (done < out.bytes.size()) {
      const ssize_t n = ::send(sockets_.at(out.to), out.bytes.data() + done, out.bytes.size() - done, MSG_NOSIGNAL);
      if (n < 0 && errno == EAGAIN) return false;
      if (n <= 0) dead(out.to);
      done += static_cast<size_t>(n);
    }
    return true;
  }
  bool receive_some(const Incoming& in, size_t& done) {
    while (done < in.bytes.size()) {
      const ssize_t n = ::recv(sockets_.at(in.from), in.bytes.data() + done, in.bytes.size() - done, 0);
      if (n < 0 && errno == EAGAIN) return false;
      if (n <= 0) dead(in.from);
      done += static_cast<size_t>(n);
    }
    return true;
  }
  std::map<int, int> sockets_;
};

class SocketTransport final : public Transport {
 public:
  explicit SocketTransport(std::shared_ptr<Sockets> sockets) : sockets_(std::move(sockets)) {}
  void move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds deadline) override {
    sockets_->move(out, in, deadline);
  }

 private:
  std::shared_ptr<Sockets> sockets_;
};

class SocketPeers final : public Peers {
 public:
  SocketPeers(int rank, int size, std::shared_ptr<Sockets> sockets)
      : rank_(rank), size_(size), sockets_(std::move(sockets)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    const auto ranks = static_cast<size_t>(size_);
    uint64_t length = message.size();
    std::vector<uint64_t> lengths(ranks, 0);
    std::vector<std::string> all(ranks);
    all[static_cast<size_t>(rank_)] = message;
    move(std::as_bytes(std::span(&length, 1)), deadline,
         [&](size_t r) { return std::as_writable_bytes(std::span(&lengths[r], 1)); });
    move(std::as_bytes(std::span(message)), deadline, [&](size_t r) {
      all[r].resize(lengths[r]);
      return std::as_writable_bytes(std::span(all[r]));
    });
    return all;
  }

 private:
  void move(std::span<const std::byte> mine, std::chrono::milliseconds deadline,
            const std::function<std::span<std::byte>(size_t rank)>& place) {
    std::vector<Outgoing> out;
    std::vector<Incoming> in;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      out.push_back({r, mine});
      in.push_back({r, place(static_cast<size_t>(r))});
    }
    sockets_->move(out, in, deadline);
  }
  int rank_, size_;
  std::shared_ptr<Sockets> sockets_;
};

// What a rank has: `peers` and `transport` for a save, `foreground` for what goes on beside it.
struct Channels {
  std::unique_ptr<Peers> foreground, peers;
  std::unique_ptr<Transport> transport;
};

// How a rank's process ended.
struct RankEnd {
  enum { kDone, kFailed, kKilled } how = kKilled;
  std::string error;  // of one that failed
};

// Runs `work` in one process a rank. One that fails stays until all have ended, so that nobody takes it for dead.
// `together`: where one is killed, all others are killed at once, as when the machine goes down.
inline std::vector<RankEnd> run_processes(int ranks, bool together,
                                          const std::function<void(int rank, Channels)>& work) {
  constexpr int kMeshes = 3;
  const auto count = static_cast<size_t>(ranks);
  std::vector<std::vector<std::map<int, int>>> ends(kMeshes, std::vector<std::map<int, int>>(count));
  const auto need = [](int result) {
    if (result != 0) throw std::runtime_error("no more descriptors");
  };
  for (auto& mesh : ends) {
    for (int a = 0; a < ranks; ++a) {
      for (int b = a + 1; b < ranks; ++b) {
        int pair[2];
        need(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        mesh[static_cast<size_t>(a)][b] = pair[0];
        mesh[static_cast<size_t>(b)][a] = pair[1];
      }
    }
  }
  std::vector<std::array<int, 2>> reports(count);
  for (auto& report : reports) need(::pipe(report.data()));
  int release[2];
  need(::pipe(release));
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    const auto me = static_cast<size_t>(rank);
    ::close(release[1]);
    for (size_t r = 0; r < count; ++r) {
      ::close(reports[r][0]);
      if (r == me) continue;
      ::close(reports[r][1]);
      for (const auto& mesh : ends)
        for (const auto& [other, socket] : mesh[r]) ::close(socket);
    }
    std::vector<std::shared_ptr<Sockets>> sockets;
    for (const auto& mesh : ends) sockets.push_back(std::make_shared<Sockets>(mesh[me]));
    std::string said = "+";
    try {
      work(rank,
           {std::make_unique<SocketPeers>(rank, ranks, sockets[0]),
            std::make_unique<SocketPeers>(rank, ranks, sockets[1]), std::make_unique<SocketTransport>(sockets[2])});
    } catch (const Error& e) {
      said = str("-", to_string(e.kind()), ": ", e.what());
    } catch (const std::exception& e) {
      said = str("-no error of ours: ", e.what());
    }
    (void)!::write(reports[me][1], said.data(), std::min<size_t>(said.size(), 4000));
    ::close(reports[me][1]);
    char none;
    (void)!::read(release[0], &none, 1);
    ::_exit(0);
  }
  for (const auto& mesh : ends)
    for (const auto& sockets : mesh)
      for (const auto& [other, socket] : sockets) ::close(socket);
  for (const auto& report : reports) ::close(report[1]);
  ::close(release[0]);

  std::vector<RankEnd> result(count);
  std::vector<bool> ended(count, false);
  for (size_t left = count; left > 0;) {
    std::vector<pollfd> polls;
    for (size_t r = 0; r < count; ++r) polls.push_back({ended[r] ? -1 : reports[r][0], POLLIN, 0});
    ::poll(polls.data(), polls.size(), -1);
    for (size_t r = 0; r < count; ++r) {
      if (ended[r] || polls[r].revents == 0) continue;
      char text[4096];
      const ssize_t n = ::read(reports[r][0], text, sizeof(text));
      ended[r] = true;
      --left;
      if (n > 0) result[r] = {text[0] == '+' ? RankEnd::kDone : RankEnd::kFailed, std::string(text + 1, text + n)};
      if (n <= 0 && together)
        for (const pid_t child : children) ::kill(child, SIGKILL);
    }
  }
  ::close(release[1]);
  for (size_t r = 0; r < count; ++r) {
    ::close(reports[r][0]);
    ::waitpid(children[r], nullptr, 0);
  }
  return result;
}

}  // namespace shardsmith
