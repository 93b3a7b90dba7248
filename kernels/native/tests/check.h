// Minimal test framework.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

[[noreturn]] inline void failed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // no destructors: other threads of the test may still run
}

template <class Error>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Runs all tests, or those whose names contain the argument. Returns the exit status.
inline int run(int count, char** arguments) {
  int ran = 0;
  for (const Test& test : tests()) {
    if (count > 1 && std::string(test.name).find(arguments[1]) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", test.name);
    try {
      test.body();
    } catch (const std::exception& error) {
      failed(test.name, 0, std::string("unexpected exception: ") + error.what());
    }
    ++ran;
  }
  std::fprintf(stderr, "%d tests passed\n", ran);
  return ran > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                         \
  static void name();                                      \
  static const check::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition) \
  if (!(condition)) check::failed(__FILE__, __LINE__, "expected " #condition)

#define CHECK_REFUSES(Error, text, action)                                                 \
  do {                                                                                     \
    const std::string message = check::message_of<Error>([&] { action; });                 \
    if (message.find(text) == std::string::npos) {                                         \
      check::failed(__FILE__, __LINE__, "expected '" text "' in '" + message + "' of " #action); \
    }                                                                                      \
  } while (false)
