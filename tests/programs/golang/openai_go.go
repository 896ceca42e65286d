// A loop of one tool with openai-go, over chat completions, streaming and not, and Responses.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

var parameters = map[string]any{
	"type":                 "object",
	"properties":           map[string]any{"name": map[string]any{"type": "string"}},
	"required":             []string{"name"},
	"additionalProperties": false,
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func readNote(arguments string) string {
	var call struct{ Name string }
	check(json.Unmarshal([]byte(arguments), &call))
	text, err := os.ReadFile(call.Name)
	check(err)
	return string(text)
}

func complete(
	client openai.Client, params openai.ChatCompletionNewParams, streaming bool,
) openai.ChatCompletionMessage {
	if !streaming {
		completion, err := client.Chat.Completions.New(context.Background(), params)
		check(err)
		return completion.Choices[0].Message
	}
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Chat.Completions.NewStreaming(context.Background(), params)
	accumulator := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		if !accumulator.AddChunk(stream.Current()) {
			panic("a chunk does not belong to the completion")
		}
	}
	check(stream.Err())
	if accumulator.Usage.TotalTokens == 0 {
		panic("no usage")
	}
	return accumulator.Choices[0].Message
}

func chat(client openai.Client, model string, streaming bool) string {
	params := openai.ChatCompletionNewParams{
		Model:    model,
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Read the note.")},
		Tools: []openai.ChatCompletionToolUnionParam{
			openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
				Name: "read_note", Description: openai.String("Reads a note."),
				Parameters: parameters, Strict: openai.Bool(true),
			}),
		},
	}
	for {
		message := complete(client, params, streaming)
		if len(message.ToolCalls) == 0 {
			return strings.TrimSpace(message.Content)
		}
		params.Messages = append(params.Messages, message.ToParam())
		for _, call := range message.ToolCalls {
			result := openai.ToolMessage(readNote(call.Function.Arguments), call.ID)
			params.Messages = append(params.Messages, result)
		}
	}
}

func respond(client openai.Client, model string) string {
	params := responses.ResponseNewParams{
		Model: model,
		Store: openai.Bool(false),
		Input: responses.ResponseNewParamsInputUnion{
			OfInputItemList: responses.ResponseInputParam{
				responses.ResponseInputItemParamOfMessage("Read the note.", responses.EasyInputMessageRoleUser),
			},
		},
		Tools: []responses.ToolUnionParam{
			responses.ToolParamOfFunction("read_note", parameters, true),
		},
	}
	for {
		response, err := client.Responses.New(context.Background(), params)
		check(err)
		called := false
		for _, item := range response.Output {
			if item.Type != "function_call" {
				continue
			}
			called = true
			call := item.AsFunctionCall()
			output := responses.ResponseInputItemParamOfFunctionCallOutput(readNote(call.Arguments))
			output.OfFunctionCallOutput.CallID = openai.String(call.CallID)
			params.Input.OfInputItemList = append(
				params.Input.OfInputItemList,
				param.Override[responses.ResponseInputItemUnionParam](json.RawMessage(call.RawJSON())),
				output,
			)
		}
		if !called {
			return strings.TrimSpace(response.OutputText())
		}
	}
}

func describe(client openai.Client, model string) string {
	format := shared.ResponseFormatJSONSchemaParam{
		JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{
			Name: "sum", Strict: openai.Bool(true),
			Schema: map[string]any{
				"type":                 "object",
				"properties":           map[string]any{"total": map[string]any{"type": "integer"}},
				"required":             []string{"total"},
				"additionalProperties": false,
			},
		},
	}
	completion, err := client.Chat.Completions.New(context.Background(), openai.ChatCompletionNewParams{
		Model:          model,
		Messages:       []openai.ChatCompletionMessageParamUnion{openai.UserMessage("What is the sum?")},
		ResponseFormat: openai.ChatCompletionNewParamsResponseFormatUnion{OfJSONSchema: &format},
	})
	check(err)
	var sum struct{ Total int }
	check(json.Unmarshal([]byte(completion.Choices[0].Message.Content), &sum))
	return fmt.Sprint("sum ", sum.Total)
}

func main() {
	url, model := os.Args[1], os.Args[2]
	client := openai.NewClient(
		option.WithBaseURL(url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0),
	)
	fmt.Println(chat(client, model, false))
	fmt.Println(chat(client, model, true))
	fmt.Println(respond(client, model))
	fmt.Println(describe(client, model))
}
